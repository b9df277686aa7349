"""One network for every backbone: non-negative features, then a linear head."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from fedsir.config.training import BackboneName, ModelConfig
from fedsir.models.tiny import TinyFeatures
from fedsir.models.weights import load_backbone_weights
from fedsir.seeding import Stream, integer

MIN_IMAGE_SIZE = 32
"""Smallest side in pixels at which every backbone still has a feature map."""


# Torch's random numbers belong to the process, and runs of a sweep begin in threads of one.
_DRAWING = threading.Lock()


class Network(nn.Module):
    """`backbone` maps (B, 3, H, W) float32 images to (B, d) non-negative features, `head` maps them to logits."""

    def __init__(self, backbone: nn.Module, feature_dim: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.backbone = backbone
        self.feature_dim = feature_dim
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(feature_dim, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) float32 to penultimate features (B, d), entries >= 0."""
        features: Tensor = self.backbone(images)
        return features.flatten(1)

    def logits(self, features: Tensor) -> Tensor:
        """(B, d) features to (B, C) logits."""
        logits: Tensor = self.head(self.dropout(features))
        return logits

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(self.features(images))


def _backbone(name: BackboneName) -> tuple[nn.Module, int]:
    """The feature part of a backbone, randomly initialised, and its feature dimension d.

    Torchvision's models keep their own tensor names, so that their weight files load strictly; only the
    classifier is taken off. SqueezeNet's (dropout, 1x1 convolution, ReLU, pooling) leaves the pooling.
    """
    if name == "tiny":
        return TinyFeatures(), TinyFeatures.feature_dim
    import torchvision  # a second to load, which those who only read settings need not wait for

    net: nn.Module
    if name == "squeezenet1_1":
        net = torchvision.models.squeezenet1_1(weights=None)
        net.classifier = nn.AdaptiveAvgPool2d(1)
        return net, 512
    if name == "shufflenet_v2_x1_0":
        net = torchvision.models.shufflenet_v2_x1_0(weights=None)
        net.fc = nn.Identity()
        return net, 1024
    net = torchvision.models.regnet_y_400mf(weights=None)
    net.fc = nn.Identity()
    return net, 440


def build_network(config: ModelConfig, num_classes: int) -> Network:
    """A network of the configured architecture; its numbers are whatever torch's generator gives."""
    backbone, feature_dim = _backbone(config.backbone)
    return Network(backbone, feature_dim, num_classes, config.dropout)


def initial_network(config: ModelConfig, num_classes: int, seed: int) -> Network:
    """The network every method of a condition starts from: configured backbone weights, head drawn from `seed`.

    Raises BadInput when the weights cannot be had or belong to another architecture.
    """
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(integer(seed, Stream.INITIAL_WEIGHTS))
        network = build_network(config, num_classes)
    load_backbone_weights(network.backbone, config)
    return network
