"""The optimizer of actors on CPUs beside torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsir.clients.lean_adam import LeanAdam
from fedsir.clients.training import reset_optimizer
from fedsir.config.training import ModelConfig, OptimizerConfig
from fedsir.models.binding import FlatBinding
from fedsir.models.network import Network, initial_network


def network() -> tuple[Network, FlatBinding]:
    made = initial_network(ModelConfig(backbone="tiny", weights="random"), 4, 0)
    return made, FlatBinding(made)


def steps(of: Network, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> None:
    for batch in images:
        optimizer.zero_grad()
        of(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 5e-2])
def test_the_same_bits_as_a_fresh_adam_however_often_it_has_been_used(weight_decay: float) -> None:
    config = OptimizerConfig(lr=1e-2, weight_decay=weight_decay)
    images = torch.rand(4, 8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    used, binding = network()
    weights = binding.read()
    lean = LeanAdam(used.parameters())
    reset_optimizer(lean, OptimizerConfig(lr=0.5))
    steps(used, lean, images)
    binding.load(weights)
    reset_optimizer(lean, config)
    steps(used, lean, images)
    plain, expected = network()
    steps(plain, torch.optim.Adam(plain.parameters(), lr=1e-2, weight_decay=weight_decay, fused=True), images)
    np.testing.assert_array_equal(binding.read().values, expected.read().values)


def test_without_gradients_nothing_is_a_step() -> None:
    """Not even weight decay acts, and the bias correction of later steps does not count it."""
    images = torch.rand(2, 8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    made, binding = network()
    lean, before = LeanAdam(made.parameters()), binding.read().values
    reset_optimizer(lean, OptimizerConfig(lr=1e-2, weight_decay=0.1))
    lean.zero_grad()
    lean.step()
    np.testing.assert_array_equal(binding.read().values, before)
    steps(made, lean, images)
    plain, expected = network()
    steps(plain, torch.optim.Adam(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True), images)
    np.testing.assert_array_equal(binding.read().values, expected.read().values)


def test_a_loss_that_leaves_out_a_part_of_the_network_is_refused() -> None:
    made, _ = network()
    lean = LeanAdam(made.parameters())
    made.features(torch.rand(2, 3, 32, 32)).square().mean().backward()
    with pytest.raises(ValueError, match=r"\d+ of \d+ parameters lack a gradient"):
        lean.step()
