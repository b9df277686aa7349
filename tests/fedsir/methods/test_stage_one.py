"""Stage I as the spectral methods share it: budgets, features, what weakens a verdict, and doing the work once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fedsir import coordinator
from fedsir.clients import spectral_tasks
from fedsir.data.transforms import draw_flips
from fedsir.methods import stage_one
from fedsir.methods.registry import find_method
from fedsir.methods.stage_one import STAGE_ONE_ROUND
from fedsir.seeding import Stream, generator
from fedsir.server import Memory, RunServer, runtime_setup


def pruning(**stage: Any) -> dict[str, Any]:
    """The method that adds least to stage I, with one epoch of it."""
    return {"name": "spectral_pruning", "stage_one": {"epochs": 1, **stage}}


def begin(
    lab: Any, method: Any, condition: Any = None, memory: Memory | None = None, **changes: Any
) -> tuple[Any, Any, RunServer]:
    """State after stage I, what went to the clients, and the server."""
    config = lab.config(method, **changes)
    condition = condition or lab.condition(config)
    watched = lab.dispatching(lab.executor)
    watched.prepare(runtime_setup(config, condition, "cpu"))
    server = RunServer(config, condition, watched, memory)
    return find_method(config.method.name).build(config.method).begin(server), watched, server


def dealt(lab: Any, *sizes: int) -> Any:
    """Clients of the given sizes in a federation without noise."""
    order = np.random.default_rng(0).permutation(160)
    ends = np.cumsum((0, *sizes))
    return lab.federation_of(lab.config(), [np.sort(order[a:b]) for a, b in pairwise(ends)])


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 9])
def test_length_steps_gives_every_client_as_many(lab: Any, steps: int) -> None:
    _, watched, server = begin(lab, pruning(length="steps", steps=steps, batch_size=8))
    (dispatch,) = watched.log
    assert [u.training.steps for u in dispatch.updates.values()] == [steps] * 4
    assert all(u.training.skipped == 0 for u in dispatch.updates.values())
    sizes = server.federation.sizes
    # Clients make the same number of steps, so small ones see their images more often.
    assert server.costs.client_epochs == pytest.approx(sum(steps * 8 / n for n in sizes), rel=0.2)


def test_length_epochs_goes_by_the_size_of_the_client(lab: Any) -> None:
    _, watched, server = begin(lab, pruning(epochs=2, batch_size=8), dealt(lab, 40, 16, 24))
    assert [u.training.steps for u in watched.log[0].updates.values()] == [10, 4, 6]
    assert server.costs.client_epochs == pytest.approx(2 * 3)


def test_the_number_of_steps_matters_with_length_steps_alone(lab: Any) -> None:
    def similarity(**stage: Any) -> bytes:
        state, _, _ = begin(lab, pruning(batch_size=16, **stage))
        return bytes(state.identification.similarity.tobytes())

    assert similarity(steps=3) == similarity()
    assert similarity(length="steps", steps=3) != similarity()


# -- features of the comparison ----------------------------------------------------------------------------------------


def features_of(lab: Any, monkeypatch: pytest.MonkeyPatch, method: Any, **changes: Any) -> dict[int, Any]:
    """What was mirrored for the comparison, by client, and the similarities."""
    seen: dict[int, Any] = {}
    real = spectral_tasks.forward_pass

    def watching(client: Any, what: str, flips: Any = None) -> Any:
        seen[client.id] = flips
        return real(client, what, flips)

    with monkeypatch.context() as patch:
        patch.setattr(spectral_tasks, "forward_pass", watching)
        state, _, _ = begin(lab, method, **changes)
    return {**seen, -1: state.identification.similarity}


def test_features_are_mirrored_where_the_training_transform_is_asked_for(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {**pruning(transform="train"), "identification": {"balance": False}}
    plain = features_of(lab, monkeypatch, {**pruning(), "identification": {"balance": False}})
    mirrored = features_of(lab, monkeypatch, method)
    again = features_of(lab, monkeypatch, method)
    sizes = lab.condition(lab.config()).federation.sizes
    for k in range(4):
        assert plain[k] is None
        expected = draw_flips(int(sizes[k]), generator(0, Stream.IDENTIFICATION, k, STAGE_ONE_ROUND))
        np.testing.assert_array_equal(mirrored[k], expected)
        np.testing.assert_array_equal(again[k], expected)
    assert mirrored[-1].tobytes() == again[-1].tobytes()
    # Nothing but the features of the comparison differs, and not by much.
    assert mirrored[-1].tobytes() != plain[-1].tobytes()
    np.testing.assert_allclose(mirrored[-1], plain[-1], atol=0.05)


def test_nothing_is_mirrored_where_training_does_not_mirror(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    never = {"data": {"transform": {"horizontal_flip": False}}}
    plain = features_of(lab, monkeypatch, pruning(), **never)
    train = features_of(lab, monkeypatch, pruning(transform="train"), **never)
    assert all(train[k] is None for k in range(4))
    assert train[-1].tobytes() == plain[-1].tobytes()


# -- what weakens a verdict --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "note"),
    [
        (16, None),
        (17, "1 of 3 clients hold fewer than 17 images (the smallest 16)"),
        (40, "2 of 3 clients hold fewer than 40 images (the smallest 16)"),
        (500, "3 of 3 clients hold fewer than 500 images (the smallest 16)"),
    ],
)
def test_small_clients_are_told(lab: Any, monkeypatch: pytest.MonkeyPatch, limit: int, note: str | None) -> None:
    assert stage_one.SMALL_CLIENT == 500
    monkeypatch.setattr(stage_one, "SMALL_CLIENT", limit)
    _, _, server = begin(lab, pruning(), dealt(lab, 40, 16, 24))
    found = [n for n in server.costs.notes if "hold fewer than" in n]
    assert len(found) == (note is not None)
    assert all(n.startswith(f"identification: {note}") for n in found)


@pytest.mark.parametrize(
    ("stage", "sizes", "steps"),
    [
        ({"batch_size": 8}, (40, 24, 32), None),  # 5, 3 and 4 batches
        ({"batch_size": 8}, (48, 24, 32), (3, 6)),
        ({"batch_size": 8, "epochs": 2}, (48, 24, 32), (6, 12)),
        ({"batch_size": 8}, (41, 16, 16), (2, 5)),  # the forty-first image joins the fifth batch
        ({"batch_size": 64}, (60, 5, 20), None),
        ({}, (64, 16, 16), (1, 4)),  # the main stage's batch of 16
        ({"batch_size": 8, "length": "steps", "steps": 4}, (60, 8, 20), None),
    ],
)
def test_uneven_numbers_of_steps_are_told(
    lab: Any, stage: dict[str, Any], sizes: tuple[int, ...], steps: tuple[int, int] | None
) -> None:
    _, watched, server = begin(lab, pruning(**stage), dealt(lab, *sizes))
    found = [n for n in server.costs.notes if "optimisation steps" in n]
    if steps is None:
        assert found == []
        return
    made = [u.training.steps for u in watched.log[0].updates.values()]
    assert (min(made), max(made)) == steps
    assert len(found) == 1
    assert f"between {steps[0]} and {steps[1]} optimisation steps" in found[0]
    assert "method.stage_one.length=steps" in found[0]


# -- shared by the methods of a condition ------------------------------------------------------------------------------


def run(lab: Any, method: Any, memory: Memory | None) -> tuple[Any, int, Any]:
    """Result of two rounds, how often stage I was trained, and the recorder."""
    config = lab.config(method, training={"rounds": 2})
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    result = coordinator.run(config, lab.condition(config), watched, [recorder], None, "cpu", memory)
    return result, len(watched.tasks("StageOne")), recorder


def same_verdict(one: Any, other: Any) -> None:
    for name in ("p_clean", "clean", "descriptors", "similarity"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert (one.split, one.notes) == (other.split, other.notes)


def figures(recorder: Any) -> list[dict[str, float]]:
    return [{k: v for k, v in r.metrics.items() if not k.startswith("seconds/")} for r in recorder.rounds]


def notes(recorder: Any) -> list[str]:
    return [note for record in recorder.rounds for note in record.notes]


def test_methods_that_ask_for_the_same_stage_one_share_it(lab: Any) -> None:
    alone = {name: run(lab, method, None) for name, method in (("oct", "oct_fedsir"), ("pruning", pruning()))}
    for order in (("oct", "pruning"), ("pruning", "oct")):
        memory = Memory()
        trained = []
        for name in order:
            result, stages, recorder = run(lab, "oct_fedsir" if name == "oct" else pruning(), memory)
            trained.append(stages)
            expected, _, undisturbed = alone[name]
            assert lab.essence(result) == lab.essence(expected)
            # The cost is booked in both runs, whoever came first.
            assert figures(recorder) == [pytest.approx(m, rel=1e-12, nan_ok=True) for m in figures(undisturbed)]
            assert notes(recorder) == notes(undisturbed)
        assert trained == [1, 0]
        assert len(memory.results) == 1


def test_seconds_of_the_shared_work_are_booked_again(lab: Any) -> None:
    memory = Memory()
    first, second = (run(lab, pruning(epochs=3), memory)[2].rounds for _ in range(2))
    (_, own) = next(iter(memory.results.values()))
    for part in ("data", "compute", "ship"):
        assert own.seconds[part] >= 0
        for rounds in (first, second):
            assert rounds[0].metrics[f"seconds/{part}"] >= own.seconds[part]


@pytest.mark.parametrize(
    "identification",
    [
        {"covariance": "full", "regularization": 1e-6},
        {"descriptors": ["mean"]},
        {"split": "largest_gap"},
        {"no_pairs": "zeros", "threshold": 0.9},
    ],
)
def test_another_split_of_the_same_similarities_needs_no_training(lab: Any, identification: Any) -> None:
    memory = Memory()
    method = {**pruning(), "identification": identification}
    begin(lab, pruning(), memory=memory)
    shared, watched, _ = begin(lab, method, memory=memory)
    assert watched.log == []
    same_verdict(shared.identification, begin(lab, method)[0].identification)


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedsir", "stage_one": {"epochs": 1}},
        {"name": "fedsir", "stage_one": {"epochs": 1, "transform": "plain"}, "identification": {"balance": True}},
        pruning(lr=1e-3),
        pruning(weight_decay=0.0),
        pruning(batch_size=8),
        pruning(epochs=2),
        pruning(length="steps", steps=3),
        pruning(transform="train"),
        {**pruning(), "identification": {"balance": False}},
        {**pruning(), "identification": {"feature_norm": "l2"}},
        {**pruning(), "identification": {"similarity_sign": "oriented"}},
        {**pruning(), "identification": {"min_class_count": 3}},
        {"name": "oct_fedsir", "stage_one": {"epochs": 1}, "logit_adjustment": {"beta": 0.5}},
        {"name": "oct_fedsir", "stage_one": {"epochs": 1}, "logit_adjustment": {"stage_one": False}},
    ],
)
def test_what_changes_training_or_similarities_is_not_shared(lab: Any, method: dict[str, Any]) -> None:
    """FedSIR, for one, trains stage I by plain cross entropy and mirrors the images that it compares."""
    memory = Memory()
    for number, settings in enumerate((pruning(), method), start=1):
        _, watched, _ = begin(lab, settings, memory=memory)
        assert len(watched.tasks("StageOne")) == 1
        assert len(memory.results) == number


def test_a_method_under_the_settings_of_another_gets_its_verdict(lab: Any) -> None:
    """FedSIR asked to identify as OCT-FedSIR does; one training serves all three."""
    ours = lab.config("oct_fedsir").method
    settings = {
        "stage_one": ours.stage_one.model_dump(),
        "identification": ours.identification.model_dump(),
        "logit_adjustment": ours.logit_adjustment.model_dump(),
    }
    memory = Memory()
    expected = begin(lab, "oct_fedsir", memory=memory)[0].identification
    for method in (pruning(), {"name": "fedsir", **settings}):
        same_verdict(begin(lab, method, memory=memory)[0].identification, expected)
    assert len(memory.results) == 1


def test_a_remembered_stage_one_survives_the_methods_that_used_it(lab: Any) -> None:
    """Nobody may write into what others will read."""
    memory = Memory()
    run(lab, "oct_fedsir", memory)
    ((updates, costs),) = memory.results.values()
    kept = {k: (u.training.weights.values.copy(), u.similarity.copy()) for k, u in updates.items()}
    booked = replace(costs, seconds=dict(costs.seconds))
    run(lab, pruning(), memory)
    run(lab, "oct_fedsir", memory)
    for k, (values, similarity) in kept.items():
        np.testing.assert_array_equal(updates[k].training.weights.values, values)
        np.testing.assert_array_equal(updates[k].similarity, similarity)
    assert costs == booked
