"""The small feature extractor."""

from __future__ import annotations

import pytest
import torch

from fedsir.models.tiny import TinyFeatures


@pytest.mark.parametrize("size", [16, 17, 64, 128])
def test_features_are_non_negative_and_of_the_stated_dimension(size: int) -> None:
    torch.manual_seed(0)
    features = TinyFeatures()(torch.randn(5, 3, size, size))
    assert features.shape == (5, TinyFeatures.feature_dim)
    assert (features >= 0).all()
    assert features.std() > 0


def test_size_of_the_network() -> None:
    count = sum(parameter.numel() for parameter in TinyFeatures().parameters())
    assert 80_000 < count < 120_000


def test_every_parameter_gets_a_gradient() -> None:
    network = TinyFeatures()
    network(torch.randn(4, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_initialisation_follows_the_seed() -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(torch.cat([parameter.flatten() for parameter in TinyFeatures().parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
