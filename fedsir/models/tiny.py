"""A small convolutional feature extractor for machines without a GPU."""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

# Batch normalisation undoes the scale of a convolution, so its scale only decides how far one step of Adam turns
# it. At PyTorch's own scale the usual 1e-3 moves a network this narrow faster than running statistics follow.
_KERNEL_SD = 0.25
_STATISTICS_MOMENTUM = 0.3


def _block(inputs: int, outputs: int, stride: int, kernel: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs, momentum=_STATISTICS_MOMENTUM),
        nn.ReLU(inplace=True),
    )


class TinyFeatures(nn.Module):
    """Four halvings of the image, then the average over what is left.

    (B, 3, S, S) float32 with S of 16 or more to (B, 96) float32. Features are averages behind a ReLU, hence
    non-negative, like those of the large backbones: leading singular directions then lie in one orthant.
    """

    feature_dim: Final[int] = 96

    def __init__(self) -> None:
        super().__init__()
        # Halving early keeps most of the work at a quarter of the pixels or less; the wide first kernel makes
        # up for it on layers of one or two pixels.
        self.blocks = nn.Sequential(
            _block(3, 12, stride=2, kernel=5),
            _block(12, 24, stride=2),
            _block(24, 48, stride=2),
            _block(48, 64, stride=1),
            _block(64, 96, stride=2),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=_KERNEL_SD)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.pool(self.blocks(images)).flatten(1)
        return features
