from __future__ import annotations

import numpy as np
import torch

from fedsir.config.data import TransformConfig
from fedsir.data.transforms import draw_flips, flip, normalize


def batch(n: int = 3, size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, size, size), dtype=torch.uint8, generator=generator)


def test_the_papers_statistics_map_to_minus_one_to_one() -> None:
    images = torch.tensor([[[0, 255]]], dtype=torch.uint8)
    found = normalize(images, TransformConfig())
    assert found.shape == (1, 3, 1, 2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0]).expand(1, 3, 1, 2))


def test_three_statistics_are_applied_channel_by_channel() -> None:
    images = batch()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    found = normalize(images, TransformConfig(mean=mean, std=std))
    for channel in range(3):
        expected = (images.float() / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(found[:, channel], expected)


def test_one_number_and_three_equal_ones_give_the_same_bits() -> None:
    one = normalize(batch(), TransformConfig(mean=0.3, std=0.7))
    three = normalize(batch(), TransformConfig(mean=(0.3, 0.3, 0.3), std=0.7))
    assert torch.equal(one, three)


def test_result_may_be_written_and_convolved_and_input_is_kept() -> None:
    images = batch()
    before = images.clone()
    found = normalize(images, TransformConfig())
    assert found.is_contiguous(memory_format=torch.channels_last)
    found[:, 0] = 0
    assert found[:, 1].abs().sum() > 0
    assert torch.nn.Conv2d(3, 4, 3)(found).shape == (3, 4, 6, 6)
    assert torch.equal(images, before)


def test_flips_are_drawn_from_the_generator() -> None:
    first = draw_flips(4000, np.random.default_rng(1))
    np.testing.assert_array_equal(first, draw_flips(4000, np.random.default_rng(1)))
    assert first.dtype == np.bool_
    assert abs(first.mean() - 0.5) < 0.05


def test_flip_mirrors_only_the_chosen() -> None:
    images = batch()
    mask = np.array([True, False, True])
    for form in (images, normalize(images, TransformConfig())):
        found = flip(form, mask)
        assert torch.equal(found[0], form[0].flip(-1))
        assert torch.equal(found[1], form[1])
        assert torch.equal(found, flip(form, torch.as_tensor(mask)))
