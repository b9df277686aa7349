"""The second view of a batch: what may change, by how much, and from which random numbers."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fedsir.config.data import TransformConfig
from fedsir.data.transforms import normalize
from fedsir.data.views import ViewDraws, ViewSettings, apply_view, draw_view

TRANSFORM = TransformConfig()


def batch(n: int = 6, transform: TransformConfig = TRANSFORM) -> Tensor:
    pixels = torch.randint(0, 256, (n, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return normalize(pixels, transform)


def draws(n: int, flips: bool = False, brightness: float = 1.0, contrast: float = 1.0) -> ViewDraws:
    return ViewDraws(torch.full((n,), flips), torch.full((n,), brightness), torch.full((n,), contrast))


def grey(images: Tensor, transform: TransformConfig = TRANSFORM) -> Tensor:
    mean, std = (torch.as_tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (transform.mean, transform.std))
    return images * std + mean


def test_without_changes_it_is_the_same_image() -> None:
    images = batch()
    torch.testing.assert_close(apply_view(images, draws(6), TRANSFORM), images, rtol=0, atol=2e-6)


def test_flips_are_exact_and_per_image() -> None:
    images = batch()
    mask = torch.tensor([True, False, True, False, False, True])
    view = apply_view(images, ViewDraws(mask, torch.ones(6), torch.ones(6)), TRANSFORM)
    for image, seen, flipped in zip(images, view, mask.tolist(), strict=True):
        torch.testing.assert_close(seen, image.flip(-1) if flipped else image, rtol=0, atol=2e-6)


@pytest.mark.parametrize("transform", [TRANSFORM, TransformConfig(mean=(0.485, 0.456, 0.406), std=(0.2, 0.3, 0.4))])
def test_brightness_and_contrast_act_on_grey_values_whatever_the_normalisation(transform: TransformConfig) -> None:
    images = batch(transform=transform)
    original = grey(images, transform)
    darker = grey(apply_view(images, draws(6, brightness=0.25), transform), transform)
    torch.testing.assert_close(darker, 0.25 * original, rtol=0, atol=1e-5)
    flat = grey(apply_view(images, draws(6, contrast=0.2), transform), transform)
    centre = original.mean(dim=(1, 2, 3), keepdim=True)
    torch.testing.assert_close(flat, centre + 0.2 * (original - centre), rtol=0, atol=1e-5)
    # An image has three equal channels before normalisation, and so has its view.
    torch.testing.assert_close(flat[:, 0], flat[:, 2], rtol=0, atol=1e-5)


def test_grey_values_stay_between_black_and_white() -> None:
    view = grey(apply_view(batch(), draws(6, brightness=1.8, contrast=1.8), TRANSFORM))
    assert view.min() >= -1e-6
    assert view.max() <= 1 + 1e-6
    assert (view > 1 - 1e-6).any()


def test_the_batch_itself_is_left_alone_and_the_memory_format_kept() -> None:
    images = batch()
    before = images.clone()
    view = apply_view(images, draws(6, True, 0.5, 0.5), TRANSFORM)
    assert torch.equal(images, before)
    assert view.is_contiguous(memory_format=torch.channels_last)
    assert (view.shape, view.dtype) == (images.shape, images.dtype)


def test_draws_come_from_torch_and_have_the_documented_shares() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        one = draw_view(4000, ViewSettings())
        torch.manual_seed(3)
        two = draw_view(4000, ViewSettings())
        three = draw_view(4000, ViewSettings())
    for name in ("flips", "brightness", "contrast"):
        assert torch.equal(getattr(one, name), getattr(two, name))
        assert not torch.equal(getattr(one, name), getattr(three, name))
    assert one.flips.float().mean() == pytest.approx(0.5, abs=0.03)
    unchanged = (one.brightness == 1) & (one.contrast == 1)
    assert unchanged.float().mean() == pytest.approx(0.2, abs=0.03)
    for factor in (one.brightness, one.contrast):
        changed = factor[~unchanged]
        assert changed.min() == pytest.approx(0.2, abs=0.01)
        assert changed.max() == pytest.approx(1.8, abs=0.01)
        assert changed.mean() == pytest.approx(1.0, abs=0.05)
    # The two factors are drawn apart.
    assert abs(torch.corrcoef(torch.stack([one.brightness, one.contrast]))[0, 1]) < 0.1


def test_every_part_can_be_switched_off_without_moving_the_random_numbers_of_the_rest() -> None:
    settings = ViewSettings(flip=False, brightness=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        full = draw_view(100, ViewSettings())
        after = torch.rand(())
        torch.manual_seed(3)
        part = draw_view(100, settings)
        assert torch.rand(()) == after
    assert not part.flips.any()
    assert (part.brightness == 1).all()
    assert torch.equal(part.contrast, full.contrast)
    assert full.flips.any()
    assert (full.brightness != 1).any()
    never = draw_view(100, ViewSettings(jitter_probability=0.0))
    assert (never.brightness == 1).all()
    assert (never.contrast == 1).all()


@pytest.mark.parametrize("settings", [{"brightness": 1.5}, {"contrast": -0.1}, {"hue": 0.2}])
def test_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ViewSettings.model_validate(settings)
