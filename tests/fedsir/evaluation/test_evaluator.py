"""Which figures a round gets, by what the method's state holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsir.evaluation.relabeling import relabeling_figures
from fedsir.evaluation.run import Evaluator
from fedsir.methods.base import MethodState
from fedsir.spectral.identification import Identification


@pytest.fixture(scope="module")
def condition(lab: Any) -> Any:
    return lab.condition(lab.config())


def verdict(clean: list[bool]) -> Identification:
    clients = len(clean)
    return Identification(
        descriptors=np.full((clients, 3), np.nan),
        similarity=np.full((clients, 4, 4), np.nan),
        p_clean=np.array(clean, dtype=np.float64),
        clean=np.array(clean),
        notes=(),
        split="none",
        mixture=None,
    )


def metrics(lab: Any, condition: Any, **state: Any) -> dict[str, float]:
    judge = Evaluator(lab.config(), condition.dataset, condition.federation, condition.truth)
    logits = np.eye(4, dtype=np.float32)[condition.dataset.test.labels]
    return dict(judge.evaluate(MethodState(condition.initial_weights, **state), (logits,)).metrics)


def of(found: dict[str, float], kind: str) -> dict[str, float]:
    return {k.removeprefix(kind): v for k, v in found.items() if k.startswith(kind)}


def test_a_method_that_neither_judges_nor_relabels_is_only_tested(lab: Any, condition: Any) -> None:
    assert metrics(lab, condition).keys() == {
        "test/accuracy",
        "test/macro_f1",
        "test/balanced_accuracy",
        "test/loss",
    }


def test_without_a_verdict_relabelling_is_judged_over_all_clients(lab: Any, condition: Any) -> None:
    """Half of the wrong labels of every client set right, and one right label of a clean client spoiled."""
    truth, observed = condition.truth.labels, condition.federation.observed
    corrected = [y.copy() for y in observed]
    for mine, true, given in zip(corrected, truth, observed, strict=True):
        wrong = np.flatnonzero(given != true)
        mine[wrong[::2]] = true[wrong[::2]]
    clean = int(np.flatnonzero(~condition.truth.noisy)[0])
    corrected[clean][0] = (truth[clean][0] + 1) % 4

    found = metrics(lab, condition, labels=tuple(corrected))
    assert of(found, "ident/") == {}
    everywhere = np.ones(lab.clients, dtype=np.bool_)
    assert of(found, "relabel/") == pytest.approx(relabeling_figures(truth, observed, corrected, everywhere))
    rights = sum(int(np.count_nonzero(t == y)) for t, y in zip(truth, observed, strict=True))
    assert found["relabel/false_correction"] == pytest.approx(1 / rights)
    assert found["relabel/recovery"] == pytest.approx(0.5, abs=0.05)


def test_with_a_verdict_only_the_clients_it_names_count(lab: Any, condition: Any) -> None:
    truth, observed = condition.truth.labels, condition.federation.observed
    noisy = np.array([False, True, False, True])
    found = metrics(lab, condition, labels=truth, identification=verdict((~noisy).tolist()))
    assert of(found, "relabel/") == pytest.approx(relabeling_figures(truth, observed, truth, noisy), nan_ok=True)
    assert set(of(found, "ident/")) == {"accuracy", "clean_f1", "noisy_recall", "margin"}
    none = metrics(lab, condition, labels=observed, identification=verdict([True] * 4))
    assert np.isnan(list(of(none, "relabel/").values())).all()


def test_methods_that_compare_no_spectra_report_verdict_and_corrections(lab: Any) -> None:
    method = {"name": "fedcorr", "tau": 0.3, "relabel_ratio": 1.0}
    recorder = lab.collector()
    config = lab.config(method, training={"rounds": 4})
    result = lab.run(config, recorder=recorder)
    condition = lab.condition(config)
    expected = relabeling_figures(
        condition.truth.labels, condition.federation.observed, result.labels, ~result.identification.clean
    )
    last = of(recorder.rounds[-1].metrics, "relabel/")
    assert last == pytest.approx(expected, nan_ok=True)
    assert last["edit"] > 0
    assert set(of(recorder.rounds[-1].metrics, "ident/")) == {"accuracy", "clean_f1", "noisy_recall", "margin"}


def test_the_truth_is_what_figures_are_held_against(lab: Any, condition: Any) -> None:
    honest = metrics(lab, condition, labels=condition.truth.labels)
    assert honest["relabel/residual"] == 0.0
    other = replace(condition, truth=replace(condition.truth, labels=condition.federation.observed))
    assert metrics(lab, other, labels=condition.truth.labels)["relabel/residual"] == honest["relabel/edit"] > 0
