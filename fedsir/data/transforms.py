"""Whole-batch image transforms, on whatever device the batch is."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsir.config.data import TransformConfig


def normalize(images: Tensor, transform: TransformConfig) -> Tensor:
    """(B, H, W) uint8 to (B, 3, H, W) float32, channels last in memory: `(x / 255 - mean) / std`, equal channels.

    With three means or deviations the channels start equal and are normalised each by its own.
    """
    mean = _statistics(transform.mean, images.device)
    std = _statistics(transform.std, images.device)
    scaled = images.unsqueeze(1).to(torch.float32).div_(255)
    # A real copy, because writing in place into an expanded tensor would write all channels at once. With channels
    # last, convolutions on CPUs are faster (SqueezeNet at 64 px by half) and later layers inherit the format.
    return ((scaled - mean) / std).expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)


def draw_flips(n: int, generator: np.random.Generator) -> NDArray[np.bool_]:
    """(n,) bool: which of n images to mirror, each with probability one half."""
    return np.asarray(generator.random(n) < 0.5, dtype=np.bool_)


def flip(images: Tensor, mask: Tensor | NDArray[np.bool_]) -> Tensor:
    """A new (B, ..., W) batch, mirrored left to right where the (B,) bool mask is true."""
    chosen = torch.as_tensor(mask, dtype=torch.bool, device=images.device)
    return torch.where(chosen.view(-1, *[1] * (images.dim() - 1)), images.flip(-1), images)


def _statistics(value: float | tuple[float, float, float], device: torch.device) -> Tensor:
    values = value if isinstance(value, tuple) else (value,)
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)
