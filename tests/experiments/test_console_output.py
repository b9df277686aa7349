"""The live line, its replacement in logs, notes, and the tables."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from experiments.console import BAR, LiveLine, Notes, is_milestone, round_text
from experiments.tables import comparison_table, mean_and_spread, noise_table
from fedsir.events import RoundFinished, RoundRecord, RunStarted, RunStopped

METRICS = {"test/accuracy": 0.8736, "relabel/residual": 0.125, "ident/accuracy": 1.0}


def _events(rounds: int, done: int = 0, notes: tuple[str, ...] = ()) -> Iterator[Any]:
    records = [RoundRecord(r, METRICS) for r in range(1, rounds + 1)]
    config = SimpleNamespace(training=SimpleNamespace(rounds=rounds), seed=3)
    dataset = SimpleNamespace(notes=notes, kind="phantom")
    facts = SimpleNamespace(notes=("2 clients are clean",))
    started: Any = RunStarted("id", config, dataset, None, None, facts, tuple(records[:done]))  # type: ignore[arg-type]
    yield started
    for record in records[done:]:
        yield RoundFinished(record, rounds)
    yield RunStopped(KeyboardInterrupt(), killed=True)


def _shown(width: int, terminal: bool, rounds: int, **more: Any) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=terminal, legacy_windows=False)
    line = LiveLine(console, "demo: oct_fedsir, seed 3", Notes(console))
    for event in _events(rounds, **more):
        line.record(event)
    colourless = re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue())
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", colourless)
    return [part for part in re.split(r"[\r\n]+", plain) if part.strip()]


@pytest.mark.parametrize("rounds", [3, 100, 2000])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_live_line_fits_and_keeps_its_bar(width: int, rounds: int) -> None:
    lines = _shown(width, terminal=True, rounds=rounds)
    assert all(len(line) <= width for line in lines)
    last = lines[-1]
    bar = re.match(r"[━╸╺ ]+", last)
    assert bar is not None
    assert len(bar[0].rstrip()) == BAR
    assert f"{rounds}/{rounds} accuracy 87.4 %" in last


def test_live_line_tells_more_where_there_is_room() -> None:
    assert "wrong labels left 12.5 %" in _shown(80, terminal=True, rounds=20)[-1]
    assert "clients judged right 100.0 %" not in _shown(80, terminal=True, rounds=20)[-1]
    assert "clients judged right 100.0 %" in _shown(120, terminal=True, rounds=20)[-1]


def test_round_text_without_a_method_that_relabels() -> None:
    assert round_text(RoundRecord(1, {"test/accuracy": 0.5})) == "accuracy 50.0 %"


@pytest.mark.parametrize(("rounds", "expected"), [(2, 2), (7, 7), (10, 10), (20, 11), (23, 11), (100, 11)])
def test_log_has_about_ten_lines_per_run(rounds: int, expected: int) -> None:
    lines = _shown(80, terminal=False, rounds=rounds)
    told = [line for line in lines if line.startswith("round ")]
    assert len(told) == expected
    assert told[-1].startswith(f"round {rounds}/{rounds}: accuracy 87.4 % · wrong labels left 12.5 %")
    assert all(line.isprintable() for line in lines)


def test_milestones_are_the_first_the_last_and_every_tenth() -> None:
    assert [r for r in range(1, 31) if is_milestone(r, 30)] == [1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]


@pytest.mark.parametrize("terminal", [True, False])
def test_heading_names_the_kind_of_images_and_where_the_run_continues(terminal: bool) -> None:
    lines = _shown(80, terminal, rounds=5, done=2)
    assert "demo: oct_fedsir, seed 3 (phantom images), continuing after round 2" in [line.strip() for line in lines]


def test_notes_are_printed_once_per_session() -> None:
    text = io.StringIO()
    console = Console(file=text, width=80)
    notes = Notes(console)
    long = "12 images dropped because another image has the same pixels: " + "x" * 60
    for label in ("oct_fedsir", "fedavg"):
        line = LiveLine(console, label, notes)
        for event in _events(2, notes=(long,)):
            line.record(event)
    assert text.getvalue().count(long) == 1  # and in one piece
    assert text.getvalue().count("seed 3: 2 clients are clean") == 1


def test_text_in_brackets_is_not_read_as_markup() -> None:
    text = io.StringIO()
    Notes(Console(file=text, width=80))("folder [bold]x[/red]")
    assert text.getvalue() == "note: folder [bold]x[/red]\n"


def _result(seed: int, accuracy: float, identified: bool) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(seed=seed),
        final={"final/accuracy": accuracy, "test/macro_f1": 0.5, "relabel/edit": 0.1 * (seed + 1)},
        predicted_noisy=np.zeros(30, dtype=np.bool_) if identified else None,
        identification_figures={"accuracy": 29 / 30, "margin": 1.234} if identified else {},
        totals={"cost/client_epochs": 250.4},
        label_history=("one",) if identified else (),
        seconds=12.345,
    )


def _rendered(results: dict[str, list[Any]]) -> str:
    text = io.StringIO()
    Console(file=text, width=80).print(comparison_table("demo (phantom images)", results))
    return text.getvalue()


def test_comparison_table_fits_into_80_columns() -> None:
    text = _rendered({m: [_result(s, 0.1 * s, m == "ours") for s in range(10)] for m in ("ours", "fedavg_long")})
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.count("45.0 ± 30.3") == 2
    assert text.count("250") == 22


def test_noise_table_has_the_methods_that_judge_or_relabel() -> None:
    results = {
        m: [_result(s, 0.5, m.startswith("ours")) for s in range(3)] for m in ("ours", "ours/equal_steps", "fedavg")
    }
    table = noise_table("noise", results)
    assert table is not None
    text = io.StringIO()
    Console(file=text, width=80).print(table)
    lines = text.getvalue().splitlines()
    assert "…" not in text.getvalue()
    assert all(len(line) <= 80 for line in lines)
    assert not any("fedavg" in line for line in lines)
    (row,) = [line for line in lines if "ours " in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["ours", "96.7", "1.23", "20.0", "–", "–", "–", "–"]
    assert noise_table("noise", {"fedavg": results["fedavg"]}) is None


def test_comparison_of_one_seed_has_no_mean() -> None:
    text = _rendered({"fedavg": [_result(0, 0.5, identified=False)]})
    assert "50.0" in text
    assert "±" not in text
    assert "mean" not in text


def test_mean_and_spread_is_the_sample_standard_deviation() -> None:
    assert mean_and_spread([0.4, 0.6]) == "50.0 ± 14.1"


def test_notes_of_rounds_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = io.StringIO()
    console = Console(file=text, width=80)
    line = LiveLine(console, "demo", Notes(console))
    for event in _events(3):
        if isinstance(event, RoundFinished):
            event = replace(event, record=replace(event.record, notes=("client 2 skipped 3 steps",)))
        line.record(event)
    assert "round 2: client 2 skipped 3 steps" in text.getvalue()
