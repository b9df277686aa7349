"""Weights as one flat vector: nothing is lost on the way, and the network keeps working on the bound tensors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedsir.config.training import ModelConfig
from fedsir.models.binding import FlatBinding, weights_of
from fedsir.models.flat import FlatWeights
from fedsir.models.network import Network, build_network, initial_network

BACKBONES = ("squeezenet1_1", "shufflenet_v2_x1_0", "regnet_y_400mf", "tiny")
# Parameters without the head, feature dimension, tensors and counters of the whole state.
FACTS = {
    "squeezenet1_1": (722_496, 512, 52, 0),
    "shufflenet_v2_x1_0": (1_253_604, 1024, 282, 56),
    "regnet_y_400mf": (3_903_144, 440, 331, 53),
}


def network_of(backbone: str, seed: int = 0, classes: int = 4) -> Network:
    return initial_network(ModelConfig.model_validate({"backbone": backbone, "weights": "random"}), classes, seed)


def pictures(count: int = 4, seed: int = 0, size: int = 64) -> torch.Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def train_a_step(network: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.Adam(network.parameters(), lr=1e-2, fused=True)
    network.train()
    optimizer.zero_grad()
    F.cross_entropy(network(pictures(seed=1)), torch.tensor([0, 1, 2, 3])).backward()
    optimizer.step()


def eval_logits(network: nn.Module) -> torch.Tensor:
    network.eval()
    with torch.no_grad():
        logits: torch.Tensor = network(pictures(seed=2))
    return logits


@pytest.mark.parametrize("backbone", FACTS)
def test_sizes_are_those_of_the_published_networks(backbone: str) -> None:
    parameters, features, tensors, counters = FACTS[backbone]
    network = network_of(backbone)
    weights, schema = weights_of(network)
    assert schema.num_parameters == parameters + 4 * (features + 1)
    assert schema.num_parameters == sum(p.numel() for p in network.parameters())
    assert network.feature_dim == features
    assert len(schema.entries) == tensors
    assert len(schema.counter_names) == counters
    assert weights.values.shape == (schema.size,)
    assert weights.counters.shape == (counters,)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_features_are_flat_and_not_negative(backbone: str) -> None:
    network = network_of(backbone, classes=3)
    for mode in (True, False):
        network.train(mode)
        features = network.features(pictures())
        assert features.shape == (4, network.feature_dim)
        assert float(features.detach().min()) >= 0
        assert float(features.detach().max()) > 0
    assert torch.equal(network(pictures()), network.logits(network.features(pictures())))
    assert network(pictures()).shape == (4, 3)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_smallest_allowed_images_still_give_features(backbone: str) -> None:
    from fedsir.models.network import MIN_IMAGE_SIZE

    features = network_of(backbone).eval().features(pictures(size=MIN_IMAGE_SIZE))
    assert torch.isfinite(features).all()
    assert float(features.detach().max()) > 0


@pytest.mark.parametrize("backbone", BACKBONES)
def test_state_survives_the_round_trip(backbone: str) -> None:
    network = network_of(backbone)
    plain = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    weights, schema = weights_of(network)
    named = dict(schema.named(weights))
    assert named.keys() == plain.keys()
    for name, tensor in plain.items():
        np.testing.assert_array_equal(named[name], tensor.numpy(), err_msg=name)
    other = network_of(backbone, seed=1)
    binding = FlatBinding(other)
    assert binding.schema == schema
    binding.load(weights)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, plain[name]), name
    again = binding.read()
    np.testing.assert_array_equal(again.values, weights.values)
    np.testing.assert_array_equal(again.counters, weights.counters)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_training_travels_with_statistics_and_counters(backbone: str) -> None:
    network = network_of(backbone)
    binding = FlatBinding(network)
    before = binding.read()
    train_a_step(network)
    after = binding.read()
    parameters = binding.schema.num_parameters
    assert not np.array_equal(after.values[:parameters], before.values[:parameters])
    np.testing.assert_array_equal(after.counters, np.ones_like(before.counters))
    if len(after.counters):
        assert not np.array_equal(after.values[parameters:], before.values[parameters:])
    other = network_of(backbone, seed=1)
    assert not torch.equal(eval_logits(other), eval_logits(network))
    FlatBinding(other).load(after)
    assert torch.equal(eval_logits(other), eval_logits(network))
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name]), name
    # Training goes on alike in both.
    train_a_step(network)
    train_a_step(other)
    assert torch.equal(eval_logits(other), eval_logits(network))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_bound_network_computes_what_a_plain_one_does(backbone: str) -> None:
    """Up to rounding: some kernels choose by where in memory a tensor begins."""
    plain, bound = network_of(backbone), network_of(backbone)
    FlatBinding(bound)
    gradients = []
    for network in (plain, bound):
        network.train()
        F.cross_entropy(network(pictures(seed=1)), torch.tensor([0, 1, 2, 3])).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    assert torch.linalg.vector_norm(gradients[0] - gradients[1]) < 1e-3 * torch.linalg.vector_norm(gradients[0])
    torch.testing.assert_close(eval_logits(plain), eval_logits(bound), rtol=1e-3, atol=1e-4)


def test_optimizers_and_gradients_from_before_the_binding_keep_working() -> None:
    network = network_of("tiny")
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, fused=True)
    train_a_step(network, optimizer)
    binding = FlatBinding(network)
    before = binding.read().values[: binding.schema.num_parameters]
    gradients = [p.grad for p in network.parameters()]
    optimizer.step()
    assert all(p.grad is g for p, g in zip(network.parameters(), gradients, strict=True))
    after = binding.read()
    assert float(np.abs(after.values[: binding.schema.num_parameters] - before).max()) > 1e-3
    for name, value in binding.schema.named(after):
        np.testing.assert_array_equal(value, network.state_dict()[name].numpy(), err_msg=name)


def test_what_is_read_is_a_copy_and_what_is_loaded_is_not_kept() -> None:
    network = network_of("tiny")
    binding = FlatBinding(network)
    weights = binding.read()
    kept = weights.values.copy()
    train_a_step(network)
    np.testing.assert_array_equal(weights.values, kept)
    binding.load(weights)
    train_a_step(network)
    np.testing.assert_array_equal(weights.values, kept)


def test_read_only_arrays_can_be_loaded() -> None:
    """Arrays from an object store are."""
    binding = FlatBinding(network_of("tiny"))
    weights = binding.read()
    weights.values.flags.writeable = weights.counters.flags.writeable = False
    binding.load(weights)
    train_a_step(network_of("tiny"))


def test_weights_of_another_network_are_refused() -> None:
    binding = FlatBinding(network_of("tiny"))
    mine = binding.read()
    others: list[FlatWeights] = [
        weights_of(network_of("tiny", classes=5))[0],
        FlatWeights(mine.values, mine.counters[:-1]),
        FlatWeights(mine.values[:-1], mine.counters),
    ]
    for other in others:
        with pytest.raises(ValueError, match="weights have"):
            binding.load(other)
    np.testing.assert_array_equal(binding.read().values, mine.values)


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        (nn.Linear(2, 2, dtype=torch.float64), "float64"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half()), "float16"),
    ],
)
def test_only_single_precision_can_be_bound(module: nn.Module, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        FlatBinding(module)


def test_integer_buffers_must_be_counters() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.arange(3))
    with pytest.raises(ValueError, match=r"table has 3"):
        FlatBinding(module)


@pytest.mark.parametrize(("backbone", "classes"), [("tiny", 2), ("squeezenet1_1", 5)])
def test_parameters_come_first_in_the_vector(backbone: str, classes: int) -> None:
    schema = weights_of(network_of(backbone, classes=classes))[1]
    kinds = [entry.trainable for entry in schema.entries]
    assert kinds == sorted(kinds, reverse=True)
    assert [e.start for e in schema.entries[1:]] == [e.stop for e in schema.entries[:-1]]
    assert schema.entries[0].start == 0
    assert schema.entries[sum(kinds) - 1].stop == schema.num_parameters


def test_the_head_is_drawn_from_the_seed_alone() -> None:
    config = ModelConfig(backbone="tiny", weights="phantom-pretext")
    torch.manual_seed(1)
    one = weights_of(initial_network(config, 4, seed=0))[0]
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    same, other = (weights_of(initial_network(config, 4, seed))[0] for seed in (0, 1))
    np.testing.assert_array_equal(one.values, same.values)
    assert not np.array_equal(one.values, other.values)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_head_is_drawn_from_the_seed_alone_in_threads_too() -> None:
    """Runs of a sweep begin in threads of one process, and torch's random numbers belong to the process."""
    config = ModelConfig(backbone="tiny", weights="random")

    def draw(seed: int) -> bytes:
        return weights_of(initial_network(config, 4, seed))[0].values.tobytes()

    seeds = list(range(8)) * 4
    expected = [draw(seed) for seed in seeds]
    with ThreadPoolExecutor(max_workers=8) as threads:
        assert list(threads.map(draw, seeds)) == expected


def test_dropout_is_off_by_default_and_before_the_head() -> None:
    config: Any = {"backbone": "tiny", "weights": "random"}
    off = build_network(ModelConfig(**config), 4).train()
    features = torch.ones(3, off.feature_dim)
    assert torch.equal(off.logits(features), off.head(features))
    on = build_network(ModelConfig(**config, dropout=0.5), 4).train()
    assert not torch.equal(on.logits(features), on.head(features))
    assert torch.equal(on.eval().logits(features), on.head(features))
