"""`fedsir report` on recorded runs, and what it says when it cannot."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.store import prepare_store
from mlflow_tracking.sweep_run import find_sweep_run

GRID = f"""
name: tiny <grid>
base: {Path(__file__).parents[1] / "tiny.yaml"}
set: [execution.actors=in-process, tracking.figures=false, tracking.experiment=tiny]
axes:
  noise:
    - {{label: mild, set: [federation.noise.ratio=0.3]}}
    - {{label: severe, set: [federation.noise.ratio=0.9]}}
methods: [fedavg, oct_fedsir]
seeds: [0, 1]
"""


def test_report_of_a_grid(fedsir: Any, tmp_path: Path) -> None:
    """One store for everything, since its schema and runs take seconds."""
    grid = tmp_path / "tiny.yaml"
    grid.write_text(GRID, encoding="utf-8")
    assert fedsir.call("sweep", "run", str(grid), "--only", "seed=0", "--only", "method=fedavg").code == 0
    # Another run of the same experiment, which is not of the grid.
    assert fedsir.tiny_run("method.name=fedprox", "tracking.experiment=tiny", "tracking.figures=false").code == 0

    ended = fedsir.call("report", str(grid), "--out", "out/report")
    assert ended.code == 0, ended.err
    files = sorted((tmp_path / "out/report").iterdir())
    assert [file.name for file in files] == ["report.csv", "report.html", "report.md", "report.tex"]
    assert all(str(Path("out/report") / file.name) in ended.out for file in files)
    assert "2 finished runs on phantom images" in ended.out
    assert "1 other run of the experiment is left out." in ended.out
    html = (tmp_path / "out/report/report.html").read_text(encoding="utf-8")
    assert "<h1>Grid tiny &lt;grid&gt;</h1>" in html
    assert "PHANTOM DATA" in html
    assert "<li>mild fedavg: seed 1</li>" in html
    assert "<li>severe oct_fedsir: seeds 0, 1</li>" in html
    assert "mild fedavg: seed 0" not in html
    with (tmp_path / "out/report/report.csv").open(encoding="utf-8", newline="") as file:
        assert not any("fedprox" in row for row in csv.reader(file))

    store = prepare_store(TrackingConfig(experiment="tiny"))
    parent = find_sweep_run(store, "tiny <grid>")
    assert parent is not None
    stored = {file.path for file in store.client.list_artifacts(parent, "report")}
    assert stored == {f"report/{file.name}" for file in files}
    assert "also stored" in ended.out

    # All runs of the experiment, one format, another folder.
    ended = fedsir.call("report", "--experiment", "tiny", "--format", "csv")
    assert ended.code == 0, ended.err
    assert [file.name for file in (tmp_path / "report").iterdir()] == ["report.csv"]
    assert "3 finished runs" in ended.out
    assert "also stored" not in ended.out

    # A part of the grid is no report of the sweep.
    ended = fedsir.call("report", str(grid), "--only", "noise=mild", "--format", "md", "--out", "part")
    assert ended.code == 0, ended.err
    assert "also stored" not in ended.out
    part = (tmp_path / "part/report.md").read_text(encoding="utf-8")
    assert "mild oct" in part
    assert "severe" not in part

    (tmp_path / "file").write_text("")
    ended = fedsir.call("report", "--experiment", "tiny", "--out", "file/report")
    assert ended.code == 2
    assert "--out file/report" in ended.err

    ended = fedsir.call("report", str(grid), "--only", "method=oct_fedsir")
    assert ended.code == 2
    assert "no run of grid tiny <grid> has finished" in ended.err


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--format", "html,pdf"], "html, md, tex, csv"),
        (["--format", ","], "html, md, tex, csv"),
        (["--only", "task=uic"], "name one"),
        (["--set", "seed=3"], "name one"),
        (["nothing.yaml"], "nothing.yaml"),
        (["quickstart", "--only", "noise=loud"], "symmetric-0.3"),
        (["paper"], "kermany.data.root"),
        (["--tracking-uri", "ftp://somewhere"], "ftp"),
        (["quickstart"], "fedsir run"),
        (["--experiment", "empty"], "fedsir run"),
    ],
)
def test_bad_input_ends_with_a_remedy_and_creates_nothing(
    fedsir: Any, tmp_path: Path, argv: list[str], wanted: str
) -> None:
    ended = fedsir.call("report", *argv)
    assert ended.code == 2
    assert wanted in ended.err
    assert "Traceback" not in ended.err
    assert list(tmp_path.iterdir()) == []
