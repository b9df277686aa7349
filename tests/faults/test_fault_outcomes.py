"""Every fault once, at a random time; `make bench-faults` repeats them and counts the repeated work."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from fault_scene import NotHere
from faults import FAULTS, Bench, Outcome
from table import main, row

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and stops processes")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_outcome_is_the_stated_one(bench: Bench, name: str) -> None:
    try:
        outcome = bench.outcome(name)
    except NotHere as reason:
        pytest.skip(str(reason))
    assert outcome.problem == ""
    # Of the runs in flight a round each at most, or what comes before the first.
    assert outcome.repeated < bench.calm.tasks / 2


# -- the table, without sweeps -------------------------------------------------------------------------------------


class FakeBench:
    """Outcomes by fault; one that is not there cannot be tried."""

    outcomes: dict[str, list[Outcome]] = {}  # noqa: RUF012

    def __init__(self, *_: Any) -> None:
        self.calm = type("Calm", (), {"tasks": 100, "seconds": 9.0})

    def outcome(self, name: str, repetition: int) -> Outcome:
        if name not in self.outcomes:
            raise NotHere("no disk")
        return self.outcomes[name][repetition]


def test_a_row_tells_how_often_and_what_it_cost() -> None:
    found = row("sweep-killed", [Outcome("", 3, 10.0), Outcome("lost", 8, 14.0)])
    assert found == f"| sweep-killed | {FAULTS['sweep-killed'].stated} | 1 of 2 | 5.5 (8) | 12 |"


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("a run is missing", 1)])
def test_an_outcome_that_is_not_the_stated_one_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: str, code: int
) -> None:
    monkeypatch.setattr("table.Bench", FakeBench)
    monkeypatch.setattr(FakeBench, "outcomes", {"actor-killed": [Outcome("", 1, 1.0), Outcome(problem, 2, 3.0)]})
    assert main(["--faults", "actor-killed,work-dir-full", "--repetitions", "2"]) == code
    printed = capsys.readouterr()
    assert f"| {2 - code} of 2 | 1.5 (2) | 2 |" in printed.out
    assert "| not tried: no disk | | |" in printed.out
    assert printed.err.count("actor-killed ") == 2
    assert problem in printed.err


def test_unknown_faults_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--faults", "actor-killed,gremlins"])
    assert end.value.code == 2
    assert "gremlins" in capsys.readouterr().err
