"""Local training of one client: batches, skipped steps, fresh optimizers, teachers and extras."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedsir.clients import training
from fedsir.clients.module import Batch
from fedsir.clients.objective import CrossEntropy, Distilled, LogitAdjusted
from fedsir.clients.runtime import Client, ClientRuntime, Work
from fedsir.clients.training import LocalUpdate, Recipe, batch_slices, forward_pass, slices_of, train_locally
from fedsir.config.training import OptimizerConfig
from fedsir.data.transforms import normalize
from fedsir.models.flat import FlatWeights
from fedsir.models.network import Network
from fedsir.objectives import kd_kl, la_cross_entropy
from fedsir.seeding import Stream, generator

RATES = OptimizerConfig(lr=1e-3, weight_decay=5e-4)


@pytest.fixture(scope="module")
def config(lab: Any) -> Any:
    return lab.config()


@pytest.fixture(scope="module")
def condition(lab: Any, config: Any) -> Any:
    return lab.condition(config)


@pytest.fixture(scope="module")
def runtime(lab: Any, config: Any) -> ClientRuntime:
    return lab.runtime(config)  # type: ignore[no-any-return]


def client(runtime: ClientRuntime, number: int = 2, round_: int = 4) -> Client:
    return Client(number, round_, runtime, Work())


def train(runtime: ClientRuntime, condition: Any, recipe: Recipe, number: int = 2, **more: Any) -> LocalUpdate:
    labels = condition.federation.observed[number]
    return train_locally(client(runtime, number), condition.initial_weights, labels, recipe, **more)


def drawn(runtime: ClientRuntime, size: int, epochs: int, number: int = 2) -> list[tuple[Any, Any]]:
    """The documented draws of order and flips."""
    rng = generator(runtime.setup.seed, Stream.BATCHES, number, 4)
    return [(rng.permutation(size), rng.random(size) < 0.5) for _ in range(epochs)]


# -- batches -----------------------------------------------------------------------------------------------------


@given(n=st.integers(0, 400), batch=st.integers(1, 140))
def test_batches_cover_everything_once_and_in_order(n: int, batch: int) -> None:
    slices = batch_slices(n, batch)
    assert [i for part in slices for i in range(n)[part]] == list(range(n))
    sizes = [part.stop - part.start for part in slices]
    assert all(size == batch for size in sizes[:-1])
    assert all(0 < size <= batch + 1 for size in sizes[-1:])
    # Batch statistics of one image are useless, unless there is but one image or batches of one were asked for.
    assert 1 not in sizes or n == 1 or batch == 1
    assert sizes[-1:] != [1] or len(sizes) == 1


@pytest.mark.parametrize(
    ("n", "batch", "sizes"),
    [(0, 4, []), (1, 4, [1]), (3, 4, [3]), (4, 4, [4]), (5, 4, [5]), (6, 4, [4, 2]), (9, 4, [4, 5]), (129, 128, [129])],
)
def test_a_last_batch_of_one_joins_the_one_before(n: int, batch: int, sizes: list[int]) -> None:
    assert [part.stop - part.start for part in batch_slices(n, batch)] == sizes


@given(total=st.integers(0, 1000), size=st.integers(1, 300))
def test_shards_cover_everything_once(total: int, size: int) -> None:
    shards = slices_of(total, size)
    assert [i for a, b in shards for i in range(a, b)] == list(range(total))
    assert all(0 < b - a <= size for a, b in shards)


@dataclass
class Watching:
    """Cross entropy that keeps what it was shown."""

    seen: list[Batch] = field(default_factory=list)

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        self.seen.append(batch)
        return F.cross_entropy(network(batch.images), batch.labels)


def test_batches_follow_the_documented_draws(runtime: ClientRuntime, condition: Any) -> None:
    """Every epoch shows each image once, mirrored or not, under the client's label and with its extras."""
    watching = Watching()
    size = int(condition.federation.sizes[2])
    recipe = Recipe(watching, 2, 8, RATES, extras={"place": np.arange(size)})
    update = train(runtime, condition, recipe)
    pixels = runtime.setup.train_images[condition.federation.indices[2]]
    labels = condition.federation.observed[2]
    batches = iter(watching.seen)
    for order, flips in drawn(runtime, size, 2):
        for part in batch_slices(size, 8):
            batch = next(batches)
            where = order[part]
            raw = np.stack([pixels[i][:, ::-1] if flips[i] else pixels[i] for i in where])
            expected = (torch.from_numpy(raw.copy()).float() / 255 - 0.5) / 0.5
            torch.testing.assert_close(batch.images[:, 0], expected, rtol=0, atol=0)
            torch.testing.assert_close(batch.images[:, 2], expected, rtol=0, atol=0)
            np.testing.assert_array_equal(batch.labels.numpy(), labels[where])
            np.testing.assert_array_equal(batch.extras["place"].numpy(), where)
    assert next(batches, None) is None
    assert update.steps == len(watching.seen)
    assert update.samples == size


def test_images_are_not_mirrored_where_it_is_switched_off(lab: Any, condition: Any) -> None:
    runtime = lab.runtime(lab.config(data={"transform": {"horizontal_flip": False}}))
    watching = Watching()
    train(runtime, condition, Recipe(watching, 1, 1000, RATES))
    size = int(condition.federation.sizes[2])
    order = drawn(runtime, size, 1)[0][0]
    pixels = runtime.setup.train_images[condition.federation.indices[2]][order]
    torch.testing.assert_close(
        watching.seen[0].images, normalize(torch.from_numpy(pixels), runtime.setup.transform), rtol=0, atol=0
    )


def test_a_client_smaller_than_a_batch_trains_in_one_step(runtime: ClientRuntime, condition: Any) -> None:
    update = train(runtime, condition, Recipe(CrossEntropy(), 1, 1000, RATES))
    assert (update.steps, update.skipped) == (1, 0)
    assert update.samples == condition.federation.sizes[2]
    assert not np.array_equal(update.weights.values, condition.initial_weights.values)


# -- steps -------------------------------------------------------------------------------------------------------


@dataclass
class Diverging:
    """Cross entropy that is not a finite number in the steps listed."""

    steps: tuple[int, ...]
    value: float = float("nan")
    count: int = 0

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        loss = F.cross_entropy(network(batch.images), batch.labels)
        self.count += 1
        return loss * self.value if self.count - 1 in self.steps else loss


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_steps_without_a_finite_loss_are_skipped_and_counted(
    runtime: ClientRuntime, condition: Any, value: float
) -> None:
    batch = int(np.ceil(condition.federation.sizes[2] / 4))
    update = train(runtime, condition, Recipe(Diverging((1, 2), value), 1, batch, RATES))
    assert (update.steps, update.skipped) == (2, 2)
    assert update.samples == condition.federation.sizes[2]
    assert np.isfinite(update.loss)
    assert np.isfinite(update.weights.values).all()
    assert not np.array_equal(update.weights.values, condition.initial_weights.values)


def test_a_client_that_skips_more_than_half_returns_what_it_received(runtime: ClientRuntime, condition: Any) -> None:
    batch = int(np.ceil(condition.federation.sizes[2] / 4))
    update = train(runtime, condition, Recipe(Diverging((0, 1, 3)), 1, batch, RATES))
    assert (update.steps, update.skipped, update.samples) == (1, 3, 0)
    np.testing.assert_array_equal(update.weights.values, condition.initial_weights.values)
    np.testing.assert_array_equal(update.weights.counters, condition.initial_weights.counters)


def test_a_run_whose_client_always_diverges_goes_on_without_it(lab: Any) -> None:
    """Through the coordinator: the others are averaged, and the user is told."""
    config = lab.config(training={"rounds": 1})
    condition = lab.condition(config)

    def spoil(items: list[Any]) -> list[Any]:
        if not hasattr(items[0].task, "recipe"):
            return items
        recipe = replace(items[3].task.recipe, objective=Diverging(tuple(range(100))))
        return [*items[:3], replace(items[3], task=replace(items[3].task, recipe=recipe))]

    recorder = lab.collector()
    result = lab.run(config, executor=lab.dispatching(lab.executor, change=spoil), recorder=recorder)
    assert any("client 3 skipped" in note for note in recorder.rounds[0].notes)
    indices, observed = condition.federation.indices[:3], condition.federation.observed[:3]
    others = lab.federation_of(config, indices, observed)
    assert result.weights_hash == lab.run(config, condition=others).weights_hash


@pytest.mark.parametrize("teacher", [False, True])
def test_the_same_task_twice_gives_the_same_bits(runtime: ClientRuntime, condition: Any, teacher: bool) -> None:
    """No moment of the optimizer, statistic or random state survives a task."""
    prior = np.zeros(4, np.float32)
    objective = Distilled(prior, 0.5, 1.0, 1.0) if teacher else CrossEntropy()
    recipe = Recipe(objective, 2, 16, RATES, teacher_logits=teacher)
    first = train(runtime, condition, recipe)
    train(runtime, condition, Recipe(CrossEntropy(), 1, 8, OptimizerConfig(lr=0.5, weight_decay=0.9)), number=0)
    second = train(runtime, condition, recipe)
    np.testing.assert_array_equal(first.weights.values, second.weights.values)
    np.testing.assert_array_equal(first.weights.counters, second.weights.counters)
    assert first.loss == second.loss


def test_received_weights_are_not_written_to(runtime: ClientRuntime, condition: Any) -> None:
    """They may be read-only memory that all actors of a machine share."""
    weights = condition.initial_weights
    shared = FlatWeights(weights.values.copy(), weights.counters.copy())
    shared.values.flags.writeable = shared.counters.flags.writeable = False
    update = train_locally(
        client(runtime), shared, condition.federation.observed[2], Recipe(CrossEntropy(), 1, 16, RATES)
    )
    np.testing.assert_array_equal(shared.values, weights.values)
    assert update.weights.values.flags.writeable


def test_rates_are_those_of_the_recipe(runtime: ClientRuntime, condition: Any) -> None:
    """The first step of Adam moves every weight by the learning rate, whatever the size of its gradient."""
    for lr in (1e-3, 1e-2):
        recipe = Recipe(CrossEntropy(), 1, 1000, OptimizerConfig(lr=lr, weight_decay=0.0))
        moved = np.abs(train(runtime, condition, recipe).weights.values - condition.initial_weights.values)
        trainable = moved[: runtime.binding.schema.num_parameters]
        assert float(np.quantile(trainable, 0.99)) == pytest.approx(lr, rel=0.02)
    still = Recipe(CrossEntropy(), 1, 1000, OptimizerConfig(lr=1e-3, weight_decay=0.0))
    decayed = Recipe(CrossEntropy(), 1, 1000, OptimizerConfig(lr=1e-3, weight_decay=1.0))
    assert not np.array_equal(
        train(runtime, condition, still).weights.values, train(runtime, condition, decayed).weights.values
    )


# -- budgets in steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 11])
def test_a_budget_of_steps_is_kept_by_clients_of_any_size(runtime: ClientRuntime, condition: Any, steps: int) -> None:
    """Clients 0 to 2 have four to eight batches of 8; client 3 has a single one and repeats it."""
    for number, batch in ((0, 8), (1, 8), (2, 8), (3, 1000)):
        watching = Watching()
        update = train(runtime, condition, Recipe(watching, 1, batch, RATES, steps=steps), number)
        assert update.steps == len(watching.seen) == steps
        assert update.samples == condition.federation.sizes[number]


@pytest.mark.parametrize("steps", [2, 7, 13])
def test_steps_go_through_the_epochs_of_an_epoch_budget(runtime: ClientRuntime, condition: Any, steps: int) -> None:
    size = int(condition.federation.sizes[2])
    place = {"place": np.arange(size)}
    by_steps, by_epochs = Watching(), Watching()
    train(runtime, condition, Recipe(by_steps, 1, 8, RATES, place, steps=steps))
    train(runtime, condition, Recipe(by_epochs, 5, 8, RATES, place))
    assert len(by_epochs.seen) >= steps
    for one, other in zip(by_steps.seen, by_epochs.seen[:steps], strict=True):
        torch.testing.assert_close(one.images, other.images, rtol=0, atol=0)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.extras["place"], other.extras["place"])


@pytest.mark.parametrize("teacher", [False, True])
def test_whole_epochs_in_steps_are_the_same_bits_as_in_epochs(
    runtime: ClientRuntime, condition: Any, teacher: bool
) -> None:
    batches = len(batch_slices(int(condition.federation.sizes[2]), 8))
    objective = Distilled(np.zeros(4, np.float32), 0.5, 1.0, 1.0) if teacher else CrossEntropy()
    recipe = Recipe(objective, 2, 8, RATES, teacher_logits=teacher)
    by_epochs = train(runtime, condition, recipe)
    by_steps = train(runtime, condition, replace(recipe, epochs=1, steps=2 * batches))
    np.testing.assert_array_equal(by_steps.weights.values, by_epochs.weights.values)
    np.testing.assert_array_equal(by_steps.weights.counters, by_epochs.weights.counters)
    assert (by_steps.loss, by_steps.steps) == (by_epochs.loss, by_epochs.steps)
    one_less = train(runtime, condition, replace(recipe, steps=2 * batches - 1))
    assert not np.array_equal(one_less.weights.values, by_epochs.weights.values)


def test_images_trained_on_and_forwarded_are_counted(runtime: ClientRuntime, condition: Any) -> None:
    labels, weights = condition.federation.observed[2], condition.initial_weights
    size, batches = len(labels), batch_slices(len(labels), 8)

    def work(recipe: Recipe) -> tuple[int, int]:
        worker = client(runtime)
        train_locally(worker, weights, labels, recipe)
        return worker.work.trained, worker.work.forwarded

    assert work(Recipe(CrossEntropy(), 3, 8, RATES)) == (3 * size, 0)
    first = sum(part.stop - part.start for part in batches[:2])
    assert work(Recipe(CrossEntropy(), 3, 8, RATES, steps=2)) == (first, 0)
    assert work(Recipe(CrossEntropy(), 1, 8, RATES, steps=len(batches) + 2)) == (size + first, 0)
    # A step without a finite loss has been computed all the same.
    assert work(Recipe(Diverging((0,)), 1, 8, RATES)) == (size, 0)
    distilled = Distilled(np.zeros(4, np.float32), 0.5, 1.0, 1.0)
    assert work(Recipe(distilled, 2, 8, RATES, teacher_logits=True)) == (2 * size, 2 * size)
    worker = client(runtime)
    forward_pass(worker, "features")
    forward_pass(worker, "logits")
    assert (worker.work.trained, worker.work.forwarded) == (0, 2 * size)


# -- forward passes ----------------------------------------------------------------------------------------------


def test_teacher_logits_are_an_eval_forward_on_the_same_mirrored_images(
    runtime: ClientRuntime, condition: Any, lab: Any, config: Any
) -> None:
    shown: list[Batch] = []

    def objective(network: Network, batch: Batch) -> Tensor:
        shown.append(batch)
        return kd_kl(batch.extras["teacher_logits"], network(batch.images), 1.0, 1.0)

    teacher = lab.run(config).weights
    train(runtime, condition, Recipe(objective, 2, 16, RATES, teacher_logits=True), teacher=teacher)
    runtime.binding.load(teacher)
    network = copy.deepcopy(runtime.network).eval()
    assert len(shown) == 2 * len(batch_slices(int(condition.federation.sizes[2]), 16))
    for batch in shown:
        with torch.no_grad():
            expected = network(batch.images)
        # Batches differ in size from the teacher's, which may cost the last bits of a convolution.
        torch.testing.assert_close(batch.extras["teacher_logits"], expected, rtol=1e-4, atol=1e-5)
        assert not batch.extras["teacher_logits"].requires_grad


def test_the_teacher_is_the_received_model_unless_another_is_given(runtime: ClientRuntime, condition: Any) -> None:
    recipe = Recipe(Distilled(np.zeros(4, np.float32), 0.5, 1.0, 1.0), 1, 16, RATES, teacher_logits=True)
    own = train(runtime, condition, recipe)
    same = train(runtime, condition, recipe, teacher=condition.initial_weights)
    other = FlatWeights(condition.initial_weights.values * 0.5, condition.initial_weights.counters)
    np.testing.assert_array_equal(own.weights.values, same.weights.values)
    assert not np.array_equal(own.weights.values, train(runtime, condition, recipe, teacher=other).weights.values)


def test_forward_passes_are_in_client_order_and_leave_the_network_alone(
    runtime: ClientRuntime, condition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "FORWARD_BATCH", 7)
    runtime.binding.load(condition.initial_weights)
    features, logits = (forward_pass(client(runtime), what) for what in ("features", "logits"))
    network = copy.deepcopy(runtime.network).eval()
    pixels = torch.from_numpy(runtime.setup.train_images[condition.federation.indices[2]])
    images = normalize(pixels, runtime.setup.transform)
    with torch.no_grad():
        torch.testing.assert_close(features, network.features(images), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits, network(images), rtol=1e-4, atol=1e-5)
    assert not features.requires_grad
    after = runtime.binding.read()
    np.testing.assert_array_equal(after.values, condition.initial_weights.values)
    np.testing.assert_array_equal(after.counters, condition.initial_weights.counters)


def test_flips_of_a_forward_pass_are_per_image(runtime: ClientRuntime, condition: Any) -> None:
    runtime.binding.load(condition.initial_weights)
    size = int(condition.federation.sizes[2])
    flips = np.arange(size) % 2 == 0
    plain, mixed = forward_pass(client(runtime), "features"), forward_pass(client(runtime), "features", flips)
    same = torch.isclose(plain, mixed, rtol=1e-5, atol=1e-6).all(dim=1).numpy()
    assert same[~flips].all()
    assert not same[flips].any()


# -- losses as values ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(runtime: ClientRuntime, condition: Any) -> Batch:
    pixels = torch.from_numpy(runtime.setup.train_images[:12].copy())
    labels = torch.from_numpy(condition.dataset.train.labels[:12].copy())
    extras = {"teacher_logits": torch.linspace(-1, 1, 48).reshape(12, 4)}
    return Batch(normalize(pixels, runtime.setup.transform), labels, extras)


@pytest.fixture
def network(runtime: ClientRuntime, condition: Any) -> Network:
    runtime.binding.load(condition.initial_weights)
    return runtime.network.eval()


def test_objectives_are_the_losses_of_their_settings(network: Network, batch: Batch) -> None:
    prior = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    logits = network(batch.images)
    plain, adjusted = (
        F.cross_entropy(logits, batch.labels),
        la_cross_entropy(logits, batch.labels, torch.from_numpy(prior)),
    )
    assert CrossEntropy()(network, batch).item() == plain.item()
    assert LogitAdjusted(prior)(network, batch).item() == adjusted.item()
    soft = kd_kl(batch.extras["teacher_logits"], logits + torch.from_numpy(prior), 2.0, 0.5)
    blended = Distilled(prior, 0.25, 2.0, 0.5)(network, batch)
    torch.testing.assert_close(blended, 0.25 * soft + 0.75 * adjusted)


def test_only_masked_images_distil(network: Network, batch: Batch) -> None:
    prior = np.zeros(4, np.float32)
    nobody = Batch(batch.images, batch.labels, {**batch.extras, "kd_mask": torch.zeros(12, dtype=torch.bool)})
    everybody = Batch(batch.images, batch.labels, {**batch.extras, "kd_mask": torch.ones(12, dtype=torch.bool)})
    distilled = Distilled(prior, 0.7, 1.0, 1.0)
    torch.testing.assert_close(distilled(network, nobody), CrossEntropy()(network, batch))
    torch.testing.assert_close(distilled(network, everybody), distilled(network, batch))
    assert distilled(network, batch).item() != pytest.approx(CrossEntropy()(network, batch).item())
