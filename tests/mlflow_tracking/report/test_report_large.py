"""The report of a store as large as the paper's grid with its ablation, and larger."""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml

from fedsir.config.run import RunConfig
from fedsir.events import ROUND_METRICS
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.report import paper
from mlflow_tracking.store import Store, prepare_store

ROUNDS = 10
SEEDS = (0, 1, 2)
NUMBER = 5000
PARTS = ("oct_fedsir/no_kd", "oct_fedsir/no_la")
MEMORY = 2e9

CODE = """
import json, sys, time
from pathlib import Path
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.report.results import read_results
from mlflow_tracking.report.tables import build_report
from mlflow_tracking.report.text import as_csv, as_latex, as_markdown
from mlflow_tracking.store import existing_store

store = existing_store(TrackingConfig(uri=sys.argv[1], experiment="large"))
times = [time.perf_counter()]
results = read_results(store)
times.append(time.perf_counter())
report = build_report(results, "large")
times.append(time.perf_counter())
texts = [make(report) for make in (as_markdown, as_latex, as_csv)]
times.append(time.perf_counter())
# Not from `resource`, whose figure a process inherits from the one that started it.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({
    "runs": len(results.runs), "failed": len(results.failed), "unfinished": len(results.unfinished),
    "tables": [table.key for table in report.tables], "budgets": int(results.runs["budget"].nunique()),
    "cells": sum(len(line.cells) for table in report.tables for line in table.lines),
    "characters": [len(text) for text in texts], "warnings": report.warnings,
    "seconds": [round(b - a, 1) for a, b in zip(times, times[1:])],
    "memory": int(status["VmHWM"].split()[0]) * 1024,
}))
"""


def designs() -> Iterator[dict[str, str]]:
    """Parameters of the paper's grid, and of as much of it again at a second budget as it takes."""
    methods = [m for m in paper.METHODS.values() if m != paper.ALL_CLEAN] + ["fedsir", *PARTS]
    for rounds in ("10", "5"):
        for task, noise, alpha, seed in itertools.product(paper.TASKS, paper.RATIOS, paper.ALPHAS, SEEDS):
            own = {"task": task, "alpha": f"{alpha:g}", "seed": str(seed), "rounds": rounds}
            if noise == "symmetric":
                yield {**own, "noise_type": "none", "noise_ratio": "0", "method": "fedavg"}
            for ratio, method in itertools.product(paper.RATIOS[noise], methods):
                yield {**own, "noise_type": noise, "noise_ratio": f"{ratio:g}", "method": method}


def fill(store: Store, folder: Path) -> None:
    """Write runs as MLflow's tables hold them, with their configurations as files; of 500 one failed, one goes on."""
    rng = random.Random(0)
    texts = {method: config_text(method) for method in {d["method"] for d in designs()}}
    rows: dict[str, list[tuple[Any, ...]]] = {
        name: [] for name in ("runs", "params", "tags", "latest", "metrics", "in")
    }
    experiment = int(store.experiment_id)
    for number, design in enumerate(itertools.islice(designs(), NUMBER)):
        run = UUID(int=number).hex
        status = {0: "FAILED", 1: "RUNNING"}.get(number % 500, "FINISHED")
        files = folder / run / "artifacts"
        files.mkdir(parents=True)
        (files / "config.yaml").write_text(texts[design["method"]].replace("seed: 0", f"seed: {design['seed']}"))
        start = 1_700_000_000_000 + 1000 * number
        rows["runs"].append(
            (run, run, "UNKNOWN", "", "", "", status, start, start + 900, "", "active", files.as_uri(), experiment)
        )
        cohort = paper.TASKS[design["task"]]
        params = {
            **{"dataset": f"phantom-{cohort}", "data_kind": "phantom", "source": "phantom", "cohort": cohort},
            **{"clients": "30", "clean_clients": "3", "train_images": "2000", "method_settings": "cut..."},
            **{f"other_{i}": "-" for i in range(20)},
            **{key: value for key, value in design.items() if key != "task"},
        }
        rows["params"] += [(key, value, run) for key, value in params.items()]
        rows["tags"] += [("fedsir.run_id", run[-16:], run), ("fedsir.error", "x", run), ("version.torch", "2", run)]
        accuracy = rng.random()
        figures = {key: rng.random() for key in ROUND_METRICS} | {"final/accuracy": accuracy}
        rows["latest"] += [(key, value, start, 1, 0, run) for key, value in figures.items()]
        rows["metrics"] += [
            (key, figures[key], start, run, step, 0) for key in ROUND_METRICS for step in range(1, ROUNDS + 1)
        ]
        rows["in"].append((run, "DATASET", f"d-{cohort}", "RUN", run, 0))
    with sqlite3.connect(store.uri.removeprefix("sqlite:///")) as connection:
        for cohort in paper.TASKS.values():
            source = json.dumps({"kind": "phantom", "classes": ["a"]})
            connection.execute(
                "INSERT INTO datasets VALUES (?, ?, ?, ?, 'phantom', ?, NULL, '{}')",
                (f"d-{cohort}", experiment, cohort, "0" * 8, source),
            )
        for statement, name in (
            (f"INSERT INTO runs VALUES ({','.join('?' * 13)}, NULL)", "runs"),
            ("INSERT INTO params VALUES (?, ?, ?)", "params"),
            ("INSERT INTO tags VALUES (?, ?, ?)", "tags"),
            ("INSERT INTO latest_metrics VALUES (?, ?, ?, ?, ?, ?)", "latest"),
            ("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", "metrics"),
            ("INSERT INTO inputs VALUES (?, ?, ?, ?, ?, ?)", "in"),
        ):
            connection.executemany(statement, rows[name])
    connection.close()


def config_text(method: str) -> str:
    config = RunConfig.model_validate({"data": {"source": "phantom"}, "method": method})
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the peak of memory")
def test_5000_runs_fit_into_memory(tmp_path: Path, start_python: Callable[..., Any]) -> None:
    """Prints what it takes; reading, computing and writing happen in a process of their own."""
    config = TrackingConfig(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="large")
    fill(prepare_store(config), tmp_path / "artifacts")
    process = start_python(CODE, config.uri)
    out, err = process.communicate()
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    print(f"{found['seconds']} s, {found['memory'] / 1e6:.0f} MB, {found['cells']} cells", file=sys.stderr)
    assert found["runs"] == NUMBER - 20
    assert (found["failed"], found["unfinished"]) == (10, 10)
    assert {"1", "2", "3", "4", "S1", "S2", "S3", "S4", "S5", "S6", "ranks", "tests", "costs"} <= set(found["tables"])
    assert found["budgets"] > 1
    assert found["memory"] < MEMORY
