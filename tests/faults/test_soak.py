"""Nothing grows over a sweep of many short runs; and growth would be seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import soak

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LEVEL = 100.0 * soak.MIB


def samples(runs: int, per_run: dict[str, float]) -> list[soak.Sample]:
    """Figures that begin at 100 MiB, or at 100, and grow by so much with each run."""
    return [
        soak.Sample(
            run,
            float(run),
            {
                what: (LEVEL if bound.unit else 100.0) + run * per_run.get(what, 0.0)
                for what, bound in soak.BOUNDS.items()
            },
        )
        for run in range(1, runs + 1)
    ]


@pytest.mark.parametrize(
    ("what", "per_run"),
    [
        ("sweep: open files", 0.02),
        ("actors: threads", 1.0),
        ("actors: number", 0.01),
        ("sweep: resident memory", 0.05 * soak.MIB),
        (f"{soak.STORE}: bytes of objects in use", 0.05 * soak.MIB),
    ],
)
def test_growth_is_seen(what: str, per_run: float) -> None:
    found = {growth.what: growth for growth in soak.growths(samples(500, {what: per_run}), 20, 50)}
    assert [name for name, growth in found.items() if not growth.is_allowed] == [what]
    assert found[what].slope == pytest.approx(100 * per_run)
    assert found[what].last - found[what].first == pytest.approx(430 * per_run)
    assert "**no**" in found[what].row


def test_a_figure_that_cannot_be_had_is_no_success() -> None:
    seen = samples(20, {})
    broken = [soak.Sample(s.done, s.seconds, {k: v for k, v in s.figures.items() if k != "Ray: threads"}) for s in seen]
    assert all(growth.is_allowed for growth in soak.growths([*seen[:-1], broken[-1]], 5, 5))
    with pytest.raises(SystemExit, match="Ray: threads: to be had after 13 of 15"):
        soak.growths([*seen[:-2], *broken[-2:]], 5, 5)


@pytest.mark.slow
def test_nothing_grows_over_forty_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, str(Path(soak.__file__)), "--runs", "40", "--warm-up", "10", "--window", "10"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=900)
    with capsys.disabled():
        print(f"\n{ended.stdout}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
