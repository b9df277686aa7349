"""FedNed: the verdict on clients, who trains what and who is averaged, and negative distillation in a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from fedsir.aggregation import weighted_mean
from fedsir.methods import fedned
from fedsir.methods.fedned import FedNedConfig, extremely_noisy

POOL = 12
ROUNDS = 5
# One round of warm-up; a tiny model is certain of little; small masks keep the pool passes short.
FEDNED = {"name": "fedned", "warmup": 0.2, "pl_threshold": 0.3, "mc_draws": 3, "pool_images": 8}
DISTILLING = {**FEDNED, "nd": {"enabled": True, "steps": 2, "lr": 1e-3}}


def settings(lab: Any, method: Any = FEDNED, rounds: int = ROUNDS, pool: int = POOL, **changes: Any) -> Any:
    federation = {"public_pool": pool, **changes.pop("federation", {})}
    return lab.config(method, training={"rounds": rounds}, federation=federation, **changes)


def observe(lab: Any, config: Any, **more: Any) -> tuple[Any, Any, Any]:
    """Result, everything that went to the workers, and the recorder."""
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    result = lab.run(config, executor=watched, recorder=recorder, **more)
    assert np.isfinite(result.weights.values).all()
    assert len(recorder.rounds) == config.training.rounds
    return result, watched, recorder


def trainings(watched: Any) -> list[Any]:
    return [d for d in watched.log if type(d.items[0].task).__name__ in ("LocalTraining", "TrainTwice")]


def kinds(dispatch: Any) -> list[str]:
    return [type(i.task).__name__ for i in dispatch.items]


def notes(recorder: Any) -> list[str]:
    return [note for record in recorder.rounds for note in record.notes]


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Sequence[int]]], None]:
    """Fix who is extremely noisy in each round after the warm-up."""

    def fix(per_round: Sequence[Sequence[int]]) -> None:
        coming = iter(per_round)

        def decide(uncertainty: NDArray[np.float64], _: float) -> NDArray[np.bool_]:
            assert uncertainty.shape == (4,)
            assert (uncertainty > 0).all()
            return np.isin(np.arange(4), next(coming))

        monkeypatch.setattr(fedned, "extremely_noisy", decide)

    return fix


# -- settings and the verdict --------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert FedNedConfig().model_dump(exclude={"name", "preset"}) == {
        "warmup": 0.1,
        "lambda_rel": 1.2,
        "temperature": 2.0,
        "pl_threshold": 0.95,
        "mc_draws": 10,
        "mc_dropout": 0.3,
        "pool_images": 128,
        "nd": {"enabled": False, "steps": 10, "lr": 1e-4, "weight_decay": 2e-3, "inverse": "neg_logits"},
    }


@pytest.mark.parametrize(
    "wrong",
    [{"lambda_rel": 0.9}, {"mc_dropout": 1.0}, {"nd": {"inverse": "softmax"}}, {"warmup": 1.5}, {"lambda": 0.12}],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FedNedConfig.model_validate({"name": "fedned", **wrong})


def test_worked_verdict() -> None:
    """Shares (.1, .1, .1, .1, .6) against lambda = 1.2 / 5 = .24."""
    verdict = extremely_noisy(np.array([0.2, 0.2, 0.2, 0.2, 1.2]), 1.2)
    np.testing.assert_array_equal(verdict, [False, False, False, False, True])


def test_the_threshold_is_relative_to_the_number_of_clients() -> None:
    for m in (5, 20, 30):
        just = np.ones(m)
        # The first client's share is x / (x + m - 1), which reaches 1.2 / m at x = 1.2 (m - 1) / (m - 1.2).
        edge = 1.2 * (m - 1) / (m - 1.2)
        just[0] = edge * 1.001
        assert np.flatnonzero(extremely_noisy(just, 1.2)).tolist() == [0]
        just[0] = edge * 0.999
        assert not extremely_noisy(just, 1.2).any()


@given(
    values=st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    factor=st.floats(1, 3),
)
def test_at_least_one_client_is_good(values: list[float], factor: float) -> None:
    assert not extremely_noisy(np.array(values), factor).all()


@pytest.mark.parametrize("m", [3, 5, 10, 20, 30])
def test_equal_clients_are_all_good_at_the_smallest_threshold(m: int) -> None:
    assert not extremely_noisy(np.full(m, 0.1), 1.0).any()


def test_uncertainties_that_are_not_finite_convict_nobody() -> None:
    np.testing.assert_array_equal(extremely_noisy(np.array([0.2, np.nan, 0.2, 2.0]), 1.2), [False, False, False, True])
    assert not extremely_noisy(np.full(4, np.nan), 1.2).any()
    assert not extremely_noisy(np.array([np.inf, 0.3, 0.3]), 1.2).any()
    assert not extremely_noisy(np.zeros(4), 1.2).any()


# -- what the method reduces to ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FEDNED, DISTILLING], ids=["default", "distilling"])
def test_without_extremely_noisy_clients_it_is_fedavg(lab: Any, verdicts: Any, method: Any) -> None:
    verdicts([[]] * ROUNDS)
    result, watched, recorder = observe(lab, settings(lab, method))
    assert result.weights_hash == lab.run(settings(lab, "fedavg")).weights_hash
    assert watched.tasks("DistilNegatively") == []
    assert [d.round for d in watched.tasks("PoolUncertainty")] == [1, 2, 3, 4]
    assert notes(recorder) == []


def test_without_public_images_it_is_fedavg_and_says_so_once(lab: Any) -> None:
    result, watched, recorder = observe(lab, settings(lab, DISTILLING, pool=0))
    assert result.weights_hash == lab.run(settings(lab, "fedavg", pool=0)).weights_hash
    assert watched.tasks("PoolUncertainty") == []
    (note,) = notes(recorder)
    assert "no public images" in note


# -- rounds --------------------------------------------------------------------------------------------------------


def test_warm_up_is_a_share_of_the_rounds(lab: Any) -> None:
    _, watched, _ = observe(lab, settings(lab, {**FEDNED, "warmup": 0.6}))
    assert [d.round for d in watched.tasks("PoolUncertainty")] == [3, 4]


def test_who_trains_twice_and_who_is_averaged(lab: Any, verdicts: Any) -> None:
    """Once extremely noisy a client always trains twice; its pseudo-label model joins when it passes."""
    verdicts([[3], [1, 3], [1], []])
    config = settings(lab)
    result, watched, recorder = observe(lab, config)
    sizes = recorder.started.federation.sizes
    rounds = trainings(watched)
    once, twice = "LocalTraining", "TrainTwice"
    assert [kinds(d) for d in rounds] == [
        [once] * 4,
        [once] * 4,
        [once, once, once, twice],
        [once, twice, once, twice],
        [once, twice, once, twice],
    ]
    after = [*[d.broadcast["weights"] for d in rounds[1:]], result.weights]
    for dispatch, left_out, weights in zip(rounds, [[], [3], [1, 3], [1], []], after, strict=True):
        good = [k for k in range(4) if k not in left_out]
        expected = weighted_mean([dispatch.updates[k].weights for k in good], sizes[good])
        assert expected is not None
        np.testing.assert_array_equal(weights.values, expected.values)
    assert notes(recorder) == ["from now on extremely noisy: client 3", "from now on extremely noisy: client 1"]
    assert result.labels is None


def test_every_upload_is_judged_on_the_same_images(lab: Any, verdicts: Any) -> None:
    """Of a client with two models it is the one trained on pseudo-labels."""
    verdicts([[2]] * ROUNDS)
    _, watched, _ = observe(lab, settings(lab))
    seen = []
    for dispatch in watched.tasks("PoolUncertainty"):
        (uploads,) = [d.updates for d in trainings(watched) if d.round == dispatch.round]
        for item in dispatch.items:
            np.testing.assert_array_equal(item.task.weights.values, uploads[item.client].weights.values)
            np.testing.assert_array_equal(item.task.positions, dispatch.items[0].task.positions)
            assert (item.task.draws, item.task.rate) == (3, 0.3)
        positions = dispatch.items[0].task.positions
        assert len(np.unique(positions)) == 8
        seen.append(tuple(positions.tolist()))
    assert len(set(seen)) > 1


def test_a_small_pool_is_used_whole(lab: Any) -> None:
    _, watched, _ = observe(lab, settings(lab, {**FEDNED, "pool_images": 128}))
    assert all(
        i.task.positions.tolist() == list(range(POOL)) for d in watched.tasks("PoolUncertainty") for i in d.items
    )


def test_two_models_cost_an_upload_more_and_twice_the_epochs(lab: Any, verdicts: Any) -> None:
    verdicts([[2]] * ROUNDS)
    _, _, recorder = observe(lab, settings(lab))
    before, after = recorder.rounds[1].metrics, recorder.rounds[2].metrics
    assert after["bytes/up"] == before["bytes/up"] * 5 / 4
    assert after["bytes/down"] == before["bytes/down"]


def test_high_confidence_thresholds_leave_the_received_model(lab: Any, verdicts: Any) -> None:
    verdicts([[2]] * ROUNDS)
    _, watched, _ = observe(lab, settings(lab, {**FEDNED, "pl_threshold": 1.5}))
    for dispatch in trainings(watched)[2:]:
        pseudo = dispatch.updates[2].weights
        np.testing.assert_array_equal(pseudo.values, dispatch.broadcast["weights"].values)
        np.testing.assert_array_equal(pseudo.counters, dispatch.broadcast["weights"].counters)


# -- negative distillation -----------------------------------------------------------------------------------------


def test_bad_teachers_are_the_models_trained_on_noisy_labels(lab: Any, verdicts: Any) -> None:
    """The only upload of a client just found, the second one of a client known, also when its first is averaged."""
    verdicts([[3], [1], [], []])
    result, watched, _ = observe(lab, settings(lab, DISTILLING))
    steps = {d.round: d for d in watched.tasks("DistilNegatively")}
    uploads = {d.round: d.updates for d in trainings(watched)}
    expected = {
        1: [uploads[1][3].weights],
        2: [uploads[2][1].weights, uploads[2][3].noisy.weights],
        3: [uploads[3][1].noisy.weights, uploads[3][3].noisy.weights],
        4: [uploads[4][1].noisy.weights, uploads[4][3].noisy.weights],
    }
    assert steps.keys() == expected.keys()
    for t, dispatch in steps.items():
        (item,) = dispatch.items
        assert [w.values.tobytes() for w in item.task.teachers] == [w.values.tobytes() for w in expected[t]]
        assert [len(np.unique(b)) for b in item.task.batches] == [8, 8]
        distilled = dispatch.outcomes[0].result.update
        assert not np.array_equal(distilled.values, dispatch.broadcast["weights"].values)
        following = [d.broadcast["weights"] for d in trainings(watched) if d.round == t + 1]
        np.testing.assert_array_equal((following[0] if following else result.weights).values, distilled.values)


def test_a_bad_teacher_that_diverged_is_left_out(lab: Any) -> None:
    class Diverging:
        def __init__(self, task: Any) -> None:
            self.task = task

        def __call__(self, client: Any, broadcast: Any) -> Any:
            result = self.task(client, broadcast)
            broken = replace(result.update.weights, values=np.full_like(result.update.weights.values, np.inf))
            return replace(result, update=replace(result.update, weights=broken))

    def spoil(items: list[Any]) -> list[Any]:
        if type(items[0].task).__name__ != "LocalTraining" or items[0].round != 1:
            return items
        return [replace(i, task=Diverging(i.task)) if i.client == 3 else i for i in items]

    seen: list[NDArray[np.float64]] = []
    original = fedned.extremely_noisy

    def judge(uncertainty: NDArray[np.float64], factor: float) -> NDArray[np.bool_]:
        seen.append(uncertainty)
        assert not original(uncertainty, factor)[3]
        return np.array([False, False, False, len(seen) == 1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedned, "extremely_noisy", judge)
        watched = lab.dispatching(lab.executor, change=spoil)
        result = lab.run(settings(lab, DISTILLING, rounds=2), executor=watched)
    assert np.isnan(seen[0][3])
    assert np.isfinite(result.weights.values).all()
    assert watched.tasks("DistilNegatively") == []


# -- edges, repetition and resumption ------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2])
def test_short_runs(lab: Any, rounds: int) -> None:
    _, watched, _ = observe(lab, settings(lab, DISTILLING, rounds=rounds))
    assert len(watched.tasks("PoolUncertainty")) == rounds - 1


def test_odd_clients(lab: Any) -> None:
    """Two classes; a client with one class, one with one image, most smaller than a batch."""
    config = settings(lab, {**DISTILLING, "lambda_rel": 1.0}, data={"cohort": "wake_forest"})
    labels = lab.dataset(config).train.labels
    condition = lab.condition(config)
    held = np.sort(np.concatenate(condition.federation.indices))
    one_class = held[labels[held] == 1][:12]
    rest = np.setdiff1d(held, one_class)
    parts = [one_class, rest[:1], rest[1:14], rest[14:]]
    dealt = lab.federation_of(config, parts)
    federation = replace(dealt.federation, public_pool=condition.federation.public_pool)
    observe(lab, config, condition=replace(dealt, federation=federation))


@pytest.fixture(scope="module")
def whole(lab: Any) -> tuple[Any, Any]:
    """At the smallest multiple about half of the clients are found, so that every kind of work occurs."""
    config = settings(lab, {**DISTILLING, "lambda_rel": 1.0})
    result, watched, _ = observe(lab, config)
    assert any("TrainTwice" in kinds(d) for d in trainings(watched))
    assert watched.tasks("DistilNegatively")
    return config, result


def test_a_run_repeats_to_the_bit(lab: Any, whole: tuple[Any, Any]) -> None:
    config, result = whole
    assert lab.essence(lab.run(config)) == lab.essence(result)


# At the end of the warm-up and within the rest.
@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interrupted_run_continues_to_the_same_bits(
    lab: Any, whole: tuple[Any, Any], tmp_path: Path, at: int
) -> None:
    config, result = whole
    file = tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, recorder=lab.interrupter(at=at), checkpoint=file)
    recorder = lab.collector()
    assert lab.essence(lab.run(config, recorder=recorder, checkpoint=file)) == lab.essence(result)
    assert [r.round for r in recorder.rounds] == list(range(at + 1, ROUNDS + 1))


def test_an_unknown_uncertainty_convicts_nobody_at_the_mean_itself() -> None:
    """Filled with the mean of the others, it exceeds a multiple of 1 by a rounding error now and then."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = rng.random(rng.integers(3, 12))
        values[1] = np.nan
        assert not extremely_noisy(values, 1.0)[1]
