"""What runs of one condition share, one after the other and at the same time."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from experiments.conditions import KEPT, Conditions
from experiments.config import load_run_file
from fedsir.condition import Condition


class Builder:
    """Stands for drawing a federation; counts how often and how many at once."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.at_once = 0
        self.most = 0

    def __call__(self, name: str) -> Condition:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        threading.Event().wait(0.01)
        self.at_once -= 1
        self.built.append(name)
        return cast("Condition", name)


@pytest.fixture
def builder() -> Builder:
    return Builder()


def use(conditions: Conditions, builder: Builder, name: str) -> Any:
    with conditions.using(name, lambda: builder(name)) as (condition, memory):
        assert condition == name
        return memory


def test_runs_of_a_condition_share_it_and_its_memory(builder: Builder) -> None:
    conditions = Conditions()
    first = use(conditions, builder, "a")
    assert use(conditions, builder, "a") is first
    assert builder.built == ["a"]


def test_an_excursion_to_the_noise_free_twin_forgets_nothing(builder: Builder) -> None:
    conditions = Conditions()
    first = use(conditions, builder, "a")
    use(conditions, builder, "a, clean")
    assert use(conditions, builder, "a") is first


def test_what_nobody_uses_is_forgotten(builder: Builder) -> None:
    conditions = Conditions()
    first = use(conditions, builder, "a")
    for number in range(KEPT):
        use(conditions, builder, f"b{number}")
    assert use(conditions, builder, "a") is not first


def test_what_is_in_use_is_not_forgotten(builder: Builder) -> None:
    conditions = Conditions()
    with conditions.using("a", lambda: builder("a")) as (_, memory):
        for number in range(KEPT + 2):
            use(conditions, builder, f"b{number}")
        assert use(conditions, builder, "a") is memory
    assert builder.built.count("a") == 1


def test_threads_build_a_condition_once_and_one_at_a_time(builder: Builder) -> None:
    conditions = Conditions()
    names = ["a", "b", "a", "b", "a", "c"]
    threads = [threading.Thread(target=use, args=(conditions, builder, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builder.most == 1
    assert sorted(set(builder.built)) == ["a", "b", "c"]
    assert builder.built.count("c") == 1


def test_a_condition_that_cannot_be_built_is_tried_again(builder: Builder) -> None:
    conditions = Conditions()

    def fail() -> Condition:
        raise ValueError("no such federation")

    with pytest.raises(ValueError, match="no such federation"), conditions.using("a", fail):
        pass
    use(conditions, builder, "a")
    assert builder.built == ["a"]


def test_methods_rounds_and_the_place_of_the_record_make_no_other_condition() -> None:
    ours = load_run_file("demo", ["method.name=oct_fedsir"]).condition_identity()
    same = (["method.name=fedsir"], ["work_dir=elsewhere", "tracking.experiment=other", "training.rounds=3"])
    assert [load_run_file("demo", overrides).condition_identity() for overrides in same] == [ours, ours]
    assert load_run_file("demo", ["seed=1"]).condition_identity() != ours
