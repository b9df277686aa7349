"""A second random view of images that are already a training batch (FedLSR, Jiang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsir.config.base import Fraction, Section
from fedsir.config.data import TransformConfig
from fedsir.data.transforms import flip


class ViewSettings(Section):
    """What the second view changes.

    Hue, saturation and grayscale of the official recipe have no meaning for single-channel scans. `brightness` and
    `contrast` are the half-widths of the factors' ranges [1 - s, 1 + s].
    """

    flip: bool = True
    brightness: Fraction = 0.8
    contrast: Fraction = 0.8
    jitter_probability: Fraction = 0.8


@dataclass(frozen=True)
class ViewDraws:
    """What happens to each image: flips (B,) bool; brightness and contrast factors (B,) float32, 1 for no change."""

    flips: Tensor
    brightness: Tensor
    contrast: Tensor


def draw_view(n: int, settings: ViewSettings) -> ViewDraws:
    """Draws for n images from torch's generator on the CPU, so that every device sees the same ones.

    Each image is mirrored with probability one half and, with probability `jitter_probability`, gets both factors.
    The number of draws does not depend on the settings.
    """
    flips, jitter, brightness, contrast = torch.rand(4, n).unbind()
    unchanged = jitter >= settings.jitter_probability
    return ViewDraws(
        flips=(flips < 0.5) & settings.flip,
        brightness=torch.where(unchanged, 1.0, 1.0 + settings.brightness * (2.0 * brightness - 1.0)),
        contrast=torch.where(unchanged, 1.0, 1.0 + settings.contrast * (2.0 * contrast - 1.0)),
    )


def apply_view(images: Tensor, draws: ViewDraws, transform: TransformConfig) -> Tensor:
    """The drawn view of normalised images (B, 3, H, W) float32, normalised again.

    Brightness scales the grey values of [0, 1], contrast their distance from the image's mean; both clip, as
    the pixels of a real scan would.
    """
    mean, std = (
        torch.tensor(value, dtype=images.dtype, device=images.device).view(1, -1, 1, 1)
        for value in (transform.mean, transform.std)
    )
    brightness, contrast = (f.to(images.device).view(-1, 1, 1, 1) for f in (draws.brightness, draws.contrast))
    grey = flip(images * std + mean, draws.flips)
    grey = (grey * brightness).clamp(0.0, 1.0)
    centre = grey.mean(dim=(1, 2, 3), keepdim=True)
    grey = (centre + contrast * (grey - centre)).clamp(0.0, 1.0)
    return ((grey - mean) / std).contiguous(memory_format=torch.channels_last)
