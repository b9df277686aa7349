from __future__ import annotations

import pytest

from fedsir.methods.registry import find_method, find_preset
from mlflow_tracking.report import paper


def test_every_condition_has_a_value_of_each_method() -> None:
    methods = [m for m in paper.METHODS.values() if m not in paper.REFERENCES]
    number = 0
    for task in paper.TASKS:
        for noise in paper.RATIOS:
            for _, ratio, alpha in paper.conditions(noise):
                number += 1
                assert all(paper.condition_value(task, noise, ratio, alpha, m) is not None for m in methods)
                assert paper.condition_value(task, noise, ratio, alpha, paper.ALL_CLEAN) is not None
    assert number == paper.NUM_CONDITIONS


@pytest.mark.parametrize("method", paper.METHODS.values())
def test_table_1_is_the_mean_of_the_supplement(method: str) -> None:
    """Computed over all conditions but one, and that one: it gives the printed mean."""
    everything = {task: set().union(*(paper.conditions(noise) for noise in paper.RATIOS)) for task in paper.TASKS}
    for task in paper.TASKS:
        for noise in paper.RATIOS:
            printed = paper.table_value("1", task, noise, method, "accuracy_mean")
            assert paper.mean_value(task, method, paper.conditions(noise)) == printed
            blocks = [
                paper.mean_value(task, method, [c for c in paper.conditions(noise) if c[2] == alpha])
                for alpha in paper.ALPHAS
            ]
            assert printed is not None
            assert sum(b.mean for b in blocks if b is not None) / 3 == pytest.approx(printed.mean, abs=0.006)
    overall = paper.overall_value(method, everything)
    assert overall == paper.table_value("1", "ALL", "all", method, "accuracy_mean")


def test_a_part_of_the_conditions_has_the_mean_of_that_part() -> None:
    part = [("symmetric", 0.3, 2.0), ("symmetric", 0.4, 2.0)]
    found = paper.mean_value("Kermany", "fedavg", part)
    assert found is not None
    assert found.mean == pytest.approx((95.20 + 94.90) / 2)
    # Pruning has one value per heterogeneity, which is that of no ratio.
    assert paper.mean_value("Kermany", paper.PRUNING, part) is None
    assert paper.condition_value("Kermany", "symmetric", 0.3, 2.0, paper.PRUNING) is None


def test_what_the_paper_has_not_is_none() -> None:
    assert paper.condition_value("Kermany", "symmetric", 0.25, 2.0, "fedavg") is None
    assert paper.condition_value("Kermany", "asymmetric", 0.3, 2.0, paper.ALL_CLEAN) is None
    assert paper.condition_value("OCTMNIST", "symmetric", 0.3, 2.0, "fedavg") is None
    assert paper.mean_value("Kermany", "fedsir", paper.conditions("symmetric")) is None
    assert paper.mean_value("Kermany", "fedavg", []) is None
    assert paper.overall_value("fedavg", {}) is None


def test_names_are_those_of_methods_and_presets_that_exist() -> None:
    for label in {*paper.METHODS.values(), *paper.OTHERS.values(), *paper.ABLATIONS.values()} - {paper.ALL_CLEAN}:
        name, _, preset = label.partition("/")
        find_method(name)
        if preset:
            find_preset(name, preset)


@pytest.mark.parametrize(
    ("params", "classes", "task"),
    [
        ({"source": "phantom", "cohort": "wake_forest", "dataset": "phantom-wake_forest"}, (), "WF"),
        ({"source": "kermany", "cohort": "OCT2017", "dataset": "kermany"}, (), "Kermany"),
        ({"source": "cohort", "cohort": "m", "dataset": "m"}, ("NGA", "GA"), "WF"),
        ({"source": "cohort", "cohort": "m", "dataset": "m"}, ("control", "mild", "moderate", "severe"), "UIC"),
        ({"source": "cohort", "cohort": "m", "dataset": "m"}, ("a", "b"), "m"),
        ({"source": "medmnist", "cohort": "octmnist", "dataset": "octmnist"}, ("CNV", "DME"), "octmnist"),
    ],
)
def test_tasks_are_told_by_source_and_classes(params: dict[str, str], classes: tuple[str, ...], task: str) -> None:
    assert paper.task_name(params, classes) == task
