"""`fedsir study identification`: its grid, its file, its tables, and a small study that is really made."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import fields, replace
from io import StringIO
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments.config import RunFile
from experiments.session import Session
from experiments.studies import identification
from experiments.studies.command import parse_alphas, parse_noise
from experiments.studies.identification import PAPER_NOISE, ROWS, SPLITS, Plan, Row, study
from experiments.studies.tables import condition_table, summary_table
from fedsir.errors import BadInput

NAN = float("nan")
ROW = Row(
    run="0123456789abcdef",
    data="demo",
    kind="phantom",
    clients=10,
    noise="symmetric",
    ratio=0.6,
    alpha=2.0,
    seed=0,
    method="oct_fedsir",
    split="mixture",
    clean=2,
    called_clean=2,
    accused_clean=0,
    missed_noisy=0,
    unflipped_noisy=1,
    clean_f1=1.0,
    accuracy=0.9,
    margin=0.4737697290629741,
    smallest_client=35,
    seconds=1.25,
)


def plan(*methods: str, **changes: Any) -> Plan:
    grid: dict[str, Any] = {"noise": (("symmetric", 0.6),), "alphas": (2.0,), "seeds": (0,)}
    return Plan(methods or ("oct_fedsir",), **{**grid, **changes})


def stage_one(label: str, overrides: Sequence[str], source: str = "demo") -> Any:
    ((found, config),) = plan(label).configs(source, overrides)
    assert found == label
    return config.method.stage_one  # type: ignore[attr-defined]


# -- the grid ----------------------------------------------------------------------------------------------------------


def test_the_grid_has_every_combination_method_by_method() -> None:
    """Methods of one condition follow each other, so that they can share stage I."""
    grid = plan(
        "fedsir", "oct_fedsir", noise=(("symmetric", 0.3), ("asymmetric", 0.8)), alphas=(2.0, 0.1), seeds=(4, 7)
    )
    cells = list(grid.configs("demo", ["federation.clients=6"]))
    found = [
        (c.federation.partition.alpha, c.federation.noise.type, c.federation.noise.ratio, c.seed, label)
        for label, c in cells
    ]
    assert found == [
        (alpha, noise, ratio, seed, method)
        for alpha in (2.0, 0.1)
        for noise, ratio in (("symmetric", 0.3), ("asymmetric", 0.8))
        for seed in (4, 7)
        for method in ("fedsir", "oct_fedsir")
    ]
    for label, config in cells:
        assert config.method.label == label
        assert config.federation.clients == 6
    conditions = [config.condition_identity() for _, config in cells]
    assert conditions[::2] == conditions[1::2]
    assert len(set(conditions)) == 8


def test_settings_of_stage_one_hold_for_every_method() -> None:
    """What the demo's file says about stage I, and what is said on the command line."""
    for label in ("oct_fedsir", "oct_fedsir/no_kd", "fedsir", "spectral_pruning"):
        found = stage_one(label, ["method.stage_one.lr=1e-5"])
        assert (found.epochs, found.batch_size, found.weight_decay, found.lr) == (8, 32, 5e-4, 1e-5)
        # What nobody has set stays with the method.
        assert found.transform == ("train" if label == "fedsir" else "plain")
        assert found.length == "epochs"
    assert stage_one("fedsir", ["method.stage_one={epochs: 3}"]).epochs == 3


def test_other_settings_of_the_method_in_the_file_do_not_reach_the_others() -> None:
    overrides = ["method.distillation.teacher=clean", "method.identification.threshold=0.9"]
    ((_, config),) = plan("fedsir").configs("demo", overrides)
    assert config.method.distillation.teacher == "global"  # type: ignore[attr-defined]
    assert config.method.identification.threshold == 0.5  # type: ignore[attr-defined]


def test_a_setting_may_be_none() -> None:
    assert stage_one("fedsir", ["method.stage_one.batch_size=null"]).batch_size is None


def test_variants_keep_what_they_are_about() -> None:
    assert stage_one("oct_fedsir/equal_steps", []).length == "steps"
    # The file's method being a variant says nothing about the others.
    assert stage_one("oct_fedsir", ["method.name=oct_fedsir/equal_steps"]).length == "epochs"
    assert stage_one("oct_fedsir", ["method.name=fedsir/faithful"]).batch_size == 32
    assert stage_one("oct_fedsir", ["method.name=fedsir"]).transform == "plain"
    # Said outright, it holds for all.
    assert stage_one("fedsir", ["method.stage_one.length=steps", "method.stage_one.steps=7"]).length == "steps"


def test_a_length_in_the_file_holds_for_every_method(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: {source: phantom}\nmethod: {name: oct_fedsir, stage_one: {length: steps, steps: 7}}\n")
    for label in ("fedsir", "spectral_pruning"):
        found = stage_one(label, [], str(file))
        assert (found.length, found.steps) == ("steps", 7)


@pytest.mark.parametrize(
    ("methods", "overrides", "message"),
    [
        (("oct_fedsir",), ["method.name=fedavg"], "method fedavg has no stage I"),
        (("oct_fedsir", "fedavg"), [], "--methods fedavg: it has no stage I"),
        (("fednoro",), [], "Choose among oct_fedsir, fedsir, spectral_pruning"),
        (("all_clean",), [], "no method 'all_clean'"),
        (("oct_fedsir/fast",), [], "no preset 'fast'"),
    ],
)
def test_methods_without_stage_one_are_refused(methods: tuple[str, ...], overrides: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        list(plan(*methods).configs("demo", overrides))


def test_noise_settings() -> None:
    assert parse_noise("paper") == PAPER_NOISE
    assert len(PAPER_NOISE) == 13
    assert parse_noise("symmetric:0.6, asymmetric:.4,symmetric:1,symmetric:0") == (
        ("symmetric", 0.6),
        ("asymmetric", 0.4),
        ("symmetric", 1.0),
        ("symmetric", 0.0),
    )


@pytest.mark.parametrize("text", ["", "symmetric", "symmetric:2", "symmetric:-0.1", "pair:0.4", "symmetric:0.4;0.6"])
def test_noise_that_is_none(text: str) -> None:
    with pytest.raises(BadInput, match="--noise"):
        parse_noise(text)


def test_alphas() -> None:
    assert parse_alphas("2.0, 0.5,1e-1") == (2.0, 0.5, 0.1)


@pytest.mark.parametrize("text", ["", "a", "0", "-1", "2.0,,0.5", "inf", "nan"])
def test_alphas_that_are_none(text: str) -> None:
    with pytest.raises(BadInput, match="--alphas"):
        parse_alphas(text)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "study.csv"
    first, second = replace(ROW, ratio=0.1 + 0.2), replace(ROW, split="largest_gap", margin=-1e-17)
    ROWS.append(file, [first])
    ROWS.append(file, [second, ROW])
    assert ROWS.read(file) == [first, second, ROW]
    with file.open(newline="") as text:
        assert next(csv.reader(text)) == [f.name for f in fields(Row)]
    ROWS.append(file, [replace(ROW, margin=NAN)])
    assert isnan(ROWS.read(file)[-1].margin)


def test_there_are_no_rows_before_there_is_a_file(tmp_path: Path) -> None:
    assert ROWS.read(tmp_path / "study.csv") == []
    # A study that was killed before its first row has an empty one.
    (tmp_path / "empty.csv").touch()
    assert ROWS.read(tmp_path / "empty.csv") == []
    ROWS.append(tmp_path / "empty.csv", [ROW])
    assert ROWS.read(tmp_path / "empty.csv") == [ROW]


@pytest.mark.parametrize(
    "content",
    [
        b"a,b\n1,2\n",
        b"a,b\n",
        b"just text",
        b"\xff\xfe\x00",
        ",".join(f.name for f in fields(Row)).encode() + b"\ndemo,phantom,ten\n",
        ",".join(f.name for f in fields(Row)).encode() + b"\ndemo,phantom,10\n",
    ],
)
def test_a_file_that_is_no_study_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "other.csv"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=r"is not the file of an identification study[\s\S]*--out"):
        ROWS.read(file)
    assert file.read_bytes() == content


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--out"):
        ROWS.read(tmp_path)
    (tmp_path / "regular").touch()
    with pytest.raises(BadInput, match="cannot be written"):
        ROWS.append(tmp_path / "regular" / "study.csv", [])


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(method, seed) of every condition that stage I would have been trained for."""
    done: list[tuple[str, int]] = []

    def identify(session: Session, config: RunFile, label: str) -> list[Row]:  # noqa: ARG001
        done.append((label, config.seed))
        f = config.federation
        about = {
            "run": config.identity(),
            "data": config.name,
            "clients": f.clients,
            "noise": f.noise.type,
            "ratio": f.noise.ratio,
            "alpha": f.partition.alpha,
            "seed": config.seed,
            "method": label,
        }
        return [replace(ROW, split=split, **about) for split in SPLITS]

    monkeypatch.setattr(identification, "_identify", identify)
    return done


def make(grid: Plan, file: Path, told: list[str] | None = None) -> list[Row]:
    return study(Session(), "demo", [], grid, file, (told if told is not None else []).append)


def test_a_stopped_study_goes_on(worked: list[tuple[str, int]], tmp_path: Path) -> None:
    file, told = tmp_path / "study.csv", list[str]()
    first = make(plan("fedsir", seeds=(0, 1)), file, told)
    assert worked == [("fedsir", 0), ("fedsir", 1)]
    assert [line.split(":")[0] for line in told] == [
        "1/2 symmetric 0.6 alpha 2.0 seed 0 fedsir",
        "2/2 symmetric 0.6 alpha 2.0 seed 1 fedsir",
    ]
    assert told[0].endswith(": mixture F1 100, largest_gap F1 100, margin +0.47, 1.2 s")
    worked.clear()
    told.clear()
    both = make(plan("fedsir", "oct_fedsir", seeds=(0, 1)), file, told)
    assert worked == [("oct_fedsir", 0), ("oct_fedsir", 1)]
    assert [line.split(" ")[0] for line in told] == ["2/4", "4/4"]
    assert len(both) == 8
    assert [row for row in both if row.method == "fedsir"] == first
    assert ROWS.read(file) == both
    worked.clear()
    assert make(plan("fedsir", "oct_fedsir", seeds=(0, 1)), file) == both
    assert worked == []


def test_only_rows_of_the_plan_are_returned(worked: list[tuple[str, int]], tmp_path: Path) -> None:
    file = tmp_path / "study.csv"
    make(plan("fedsir", seeds=(0, 1, 2)), file)
    worked.clear()
    found = make(plan("fedsir", seeds=(1,)), file)
    assert {row.seed for row in found} == {1}
    assert worked == []


def test_other_settings_are_another_study(worked: list[tuple[str, int]], tmp_path: Path) -> None:
    file = tmp_path / "study.csv"
    make(plan("fedsir"), file)
    changed = study(Session(), "demo", ["method.stage_one.lr=1e-4"], plan("fedsir"), file, lambda _: None)
    assert worked == [("fedsir", 0), ("fedsir", 0)]
    assert len(changed) == len(SPLITS)
    assert len(ROWS.read(file)) == 2 * len(SPLITS)


def test_rows_are_kept_as_they_come(worked: list[tuple[str, int]], tmp_path: Path) -> None:
    file = tmp_path / "study.csv"

    def stop_after_the_second(line: str) -> None:
        if line.startswith("2/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(Session(), "demo", [], plan("fedsir", seeds=(0, 1, 2)), file, stop_after_the_second)
    assert len(ROWS.read(file)) == 4
    worked.clear()
    make(plan("fedsir", seeds=(0, 1, 2)), file)
    assert worked == [("fedsir", 2)]


def test_what_is_asked_for_twice_is_done_once(worked: list[tuple[str, int]], tmp_path: Path) -> None:
    found = make(plan("fedsir", noise=parse_noise("symmetric:0.6,symmetric:.60")), tmp_path / "study.csv")
    assert worked == [("fedsir", 0)]
    assert len(found) == 2


def test_a_file_that_cannot_be_used_comes_up_before_any_work(worked: list[tuple[str, int]], tmp_path: Path) -> None:
    (tmp_path / "regular").touch()
    for file in (tmp_path, tmp_path / "regular" / "study.csv"):
        with pytest.raises(BadInput):
            make(plan("fedsir"), file)
    assert worked == []


# -- tables ------------------------------------------------------------------------------------------------------------


def cells(table: Any) -> list[list[str]]:
    """The rows of a table as printed, without rules."""
    out = StringIO()
    Console(file=out, width=200).print(table)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_the_summary_has_a_line_per_method_split_and_kind_of_noise() -> None:
    rows = [
        replace(ROW, seed=0, clean_f1=1.0, margin=0.5),
        replace(ROW, seed=1, clean_f1=0.5, accused_clean=1, missed_noisy=0, margin=-0.1),
        replace(ROW, seed=2, clean_f1=0.6, accused_clean=0, missed_noisy=3, margin=NAN),
        replace(ROW, seed=0, split="largest_gap", clean_f1=0.25, accused_clean=2, margin=0.0),
        replace(ROW, seed=0, noise="asymmetric", clean_f1=0.125, missed_noisy=1, margin=2.0),
        replace(ROW, seed=0, split="largest_gap", noise="asymmetric"),
    ]
    assert cells(summary_table("title", rows)) == [
        ["oct_fedsir, mixture", "sym", "3", "70.0", "33", "33", "0.33", "1.00"],
        ["oct_fedsir, mixture", "asym", "1", "12.5", "0", "100", "0.00", "1.00"],
        ["oct_fedsir, largest gap", "sym", "1", "25.0", "0", "0", "2.00", "0.00"],
        ["oct_fedsir, largest gap", "asym", "1", "100.0", "100", "100", "0.00", "0.00"],
    ]


def test_conditions_have_the_mean_and_the_worst_margin() -> None:
    rows = [
        replace(ROW, seed=0, clean_f1=1.0, margin=0.5),
        replace(ROW, seed=1, clean_f1=0.5, margin=-1.26),
        replace(ROW, alpha=0.1, clean_f1=0.0, margin=-0.02),
        replace(ROW, noise="asymmetric", ratio=0.4, seed=0, margin=NAN),
        replace(ROW, noise="asymmetric", ratio=0.4, seed=1, margin=1.0),
        replace(ROW, noise="asymmetric", ratio=0.5, alpha=0.1, margin=NAN),
    ]
    table = condition_table("title", rows)
    assert [str(column.header) for column in table.columns] == ["noise", "ratio", "alpha 2", "alpha 0.1"]
    assert cells(table) == [
        ["symmetric", "0.6", "75 (-1.3)", "0 (-0.0)"],
        # A run without a margin does not count, wherever it stands.
        ["asymmetric", "0.4", "100 (+1.0)", ""],
        ["asymmetric", "0.5", "", "100 (–)"],
    ]
    assert cells(condition_table("title", rows[::-1]))[1][3] == "100 (+1.0)"


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_small_study(fedsir: Any, lab: Any, tmp_path: Path, recorded_runs: Any) -> None:
    """Stage I of two methods under two noises, in this process; again it costs nothing."""
    settings = [*fedsir.tiny, "execution.actors=in-process"]
    grid = ["--methods=fedsir,oct_fedsir", "--noise=symmetric:0.6,asymmetric:0.6", "--alphas=2", "--seeds=0"]
    argv = ["study", "identification", "demo", *grid, *(w for s in settings for w in ("--set", s))]
    ended = fedsir.call(*argv)
    assert (ended.code, ended.err) == (0, "")
    file = Path("fedsir-runs/studies/identification-demo.csv")
    assert f"verdicts in {file}" in ended.out
    assert [line[:3] for line in ended.out.splitlines() if line[1:2] == "/"] == ["1/4", "2/4", "3/4", "4/4"]
    assert "demo (phantom images, 4 clients, seeds 0): clean-client F1 % by mixture" in ended.out
    for line in ("fedsir, largest gap", "oct_fedsir, mixture", "asymmetric", "asym "):
        assert line in ended.out
    assert max(len(line) for line in ended.out.splitlines() if line.startswith("│")) <= 80
    rows = ROWS.read(file)
    assert [(r.noise, r.method, r.split) for r in rows] == [
        (noise, method, split)
        for noise in ("symmetric", "asymmetric")
        for method in ("fedsir", "oct_fedsir")
        for split in SPLITS
    ]
    assert {(r.data, r.kind, r.clients, r.clean, r.alpha, r.seed) for r in rows} == {("demo", "phantom", 4, 2, 2.0, 0)}
    for of_one in (rows[i : i + 2] for i in range(0, 8, 2)):
        assert len({r.margin for r in of_one}) == len({r.seconds for r in of_one}) == 1
        for r in of_one:
            wrong = r.accused_clean + r.missed_noisy
            assert r.accuracy == pytest.approx(1 - wrong / 4)
            right = r.clean - r.accused_clean
            assert r.called_clean == right + r.missed_noisy
            assert r.clean_f1 == pytest.approx(2 * right / (2 * right + wrong))
    # A whole run comes to the same verdict.
    ((_, config),) = plan("fedsir").configs("demo", settings)
    figures = lab.run(config).identification_figures
    assert figures["clean_f1"] == rows[0].clean_f1
    assert figures["margin"] == rows[0].margin
    # Nothing is recorded, and nothing is done twice.
    assert not list(tmp_path.rglob("*.db"))
    assert recorded_runs(config.tracking.uri) == 0
    before = file.read_bytes()
    again = fedsir.call(*argv)
    assert again.code == 0
    assert "1/4" not in again.out
    assert again.out.splitlines()[-1] == f"verdicts in {file}"
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--noise", "symmetric"], "--noise 'symmetric': expected paper"),
        (["--alphas", "0"], "--alphas '0'"),
        (["--seeds", "a"], "--seeds"),
        (["--methods", "fedavg"], "--methods fedavg: it has no stage I"),
        (["--methods", "oct_fedsirr"], "Did you mean oct_fedsir?"),
        (["--methods", "oct_fedsir/no_kf"], "Did you mean no_kd?"),
        (["--set", "method.name=fedavg"], "has no stage I"),
        (["--set", "method.stage_one.epoch=3"], "Did you mean epochs?"),
        (["--set", "federation.clean_clients=9"], "clean_clients is 9"),
        (["--out", "other.csv"], "other.csv is not the file of an identification study"),
        (["--out", "."], "--out"),
        (["--out", "other.csv/study.csv"], "--out"),
    ],
)
def test_bad_inputs_of_a_study(
    fedsir: Any, worked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, argv: list[str], part: str
) -> None:
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started for an input that is bad"))
    Path("other.csv").write_text("a,b\n1,2\n")
    base = ["study", "identification", "demo", "--seeds", "0", *fedsir.tiny_options("execution.actors=in-process")]
    ended = fedsir.call(*base, *argv)
    assert ended.code == 2
    assert ended.err.startswith("fedsir: ")
    assert part in ended.err
    assert "Traceback" not in ended.out + ended.err
    assert worked == []
    assert Path("other.csv").read_text() == "a,b\n1,2\n"
