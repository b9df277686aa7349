"""Worklist, review, example consortium and page: what is written, what comes back, what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from experiments.audit.example import write_consortium
from experiments.audit.worklist_file import (
    COLUMNS,
    GRADER,
    Entry,
    graded,
    read_worklist,
    worklist_rows,
    write_worklist,
)
from fedsir.audit.consortium import AVERAGED, PhantomSite, draw_consortium
from fedsir.audit.worklist import Proposal
from fedsir.errors import BadInput

CLASSES = ("CNV", "DME", "=cmd")
PROPOSALS = (
    Proposal(2, 0, 1, (0.2, 0.9), (0.4, 0.1), 2.5, 1.0),
    Proposal(0, 1, 2, (0.3, 0.6), (0.3, 0.2), 0.5, 0.25),
)
IMAGES, SITES = ("@a.png", "b.png", "c, d.png"), ("-north", "south", "south")


@pytest.fixture
def worklist(tmp_path: Path) -> Path:
    path = tmp_path / "worklist.csv"
    write_worklist(path, worklist_rows(PROPOSALS, IMAGES, SITES, CLASSES))
    return path


Grading = dict[str, str]


@pytest.fixture
def grade(worklist: Path, tmp_path: Path) -> Callable[[Grading], Path]:
    """A copy of the worklist with labels by image, in reverse order."""

    def fill(labels: Grading, **changes: str) -> Path:
        with worklist.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            row[GRADER] = labels.get(row["image"].lstrip("'"), "")
            row.update(changes)
        path = tmp_path / "graded.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(reversed(rows))
        return path

    return fill


# -- worklist and review -----------------------------------------------------------------------------------------------


def test_a_worklist_comes_back_as_it_was_written(worklist: Path) -> None:
    assert read_worklist(worklist) == [
        Entry("c, d.png", "south", "CNV", "DME", None),
        Entry("@a.png", "-north", "DME", "=cmd", None),
    ]


def test_no_cell_of_a_worklist_is_a_formula(worklist: Path) -> None:
    with worklist.open(newline="", encoding="utf-8-sig") as file:
        cells = [cell for row in csv.DictReader(file) for cell in row.values()]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]


def test_graders_may_leave_rows_empty_or_unsure_and_write_labels_in_any_case(
    worklist: Path, grade: Callable[[Grading], Path]
) -> None:
    path = grade({"c, d.png": "dme"})
    assert graded(read_worklist(worklist), read_worklist(path), CLASSES, path) == [
        Entry("c, d.png", "south", "CNV", "DME", "DME")
    ]
    path = grade({"c, d.png": "Unsure", "@a.png": "=cmd"})
    found = graded(read_worklist(worklist), read_worklist(path), CLASSES, path)
    assert [e.grader for e in found] == ["=cmd", "unsure"]


@pytest.mark.parametrize(
    ("labels", "changes", "says"),
    [
        ({"c, d.png": "glaucoma"}, {}, "grader_label 'glaucoma' is no class"),
        ({}, {"proposed_label": "CNV"}, "CNV to CNV, but the audit proposed CNV to DME"),
        ({}, {"image": "other.png"}, "other.png: not in the audit's worklist"),
        ({}, {"image": "c, d.png", "observed_label": "CNV", "proposed_label": "DME"}, "c, d.png: twice"),
    ],
)
def test_reviews_that_do_not_fit_the_audit_are_refused(
    worklist: Path, grade: Callable[..., Path], labels: Grading, changes: dict[str, str], says: str
) -> None:
    path = grade(labels, **changes)
    with pytest.raises(BadInput) as refused:
        graded(read_worklist(worklist), read_worklist(path), CLASSES, path)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"image;site;observed_label;proposed_label;grader_label\n", "separated by semicolons"),
        (b"image,site\n", "lacks the columns observed_label, proposed_label, grader_label"),
        (b"", "lacks the columns image"),
        (b"\xff\xfe", "cannot be read as a worklist"),
    ],
)
def test_files_that_are_no_worklist_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        read_worklist(path)
    assert says in str(refused.value)


# -- the example consortium --------------------------------------------------------------------------------------------

SMALL = (
    PhantomSite("North", patients=6),
    PhantomSite("South", patients=6, wrong=0.5),
    PhantomSite("East", patients=4, only="DME"),
    PhantomSite("West", patients=4, look=AVERAGED),
)


def test_the_example_on_disk_is_what_was_drawn(tmp_path: Path) -> None:
    images, wrong = write_consortium(tmp_path / "example", 0, 32, SMALL)
    drawn = draw_consortium(SMALL, 0, 32)
    tables = {}
    for name in ("manifest.csv", "truth.csv"):
        with (tmp_path / "example" / name).open(newline="", encoding="utf-8") as file:
            tables[name] = list(csv.DictReader(file))
    manifest, truth = tables["manifest.csv"], tables["truth.csv"]
    assert (len(manifest), wrong) == (images, int((drawn.true != drawn.observed).sum()))
    assert sum(m["label"] != t["true_label"] for m, t in zip(manifest, truth, strict=True)) == wrong > 0
    pixels = np.asarray(Image.open(tmp_path / "example" / manifest[5]["path"]))
    assert np.array_equal(pixels, drawn.images[5])


def test_only_noisy_sites_have_wrong_labels_and_one_class_sites_one_class() -> None:
    drawn = draw_consortium(SMALL, 1, 32)
    wrong = np.bincount(drawn.sites[drawn.true != drawn.observed], minlength=4)
    assert (wrong > 0).tolist() == [False, True, False, False]
    assert len(np.unique(drawn.true[drawn.sites == 2])) == 1
    assert np.array_equal(np.bincount(drawn.sites), np.array([6, 6, 4, 4]) * 4)
    assert all(len(np.unique(drawn.sites[drawn.patients == p])) == 1 for p in np.unique(drawn.patients))


def test_another_scanner_changes_pictures_and_nothing_else() -> None:
    plain, other = (draw_consortium((SMALL[0], PhantomSite("X", 4, look=look)), 2, 32) for look in (None, AVERAGED))
    assert np.array_equal(plain.observed, other.observed)
    assert np.array_equal(plain.images[plain.sites == 0], other.images[other.sites == 0])
    assert not np.array_equal(plain.images[plain.sites == 1], other.images[other.sites == 1])


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(BadInput, match="not empty"):
        write_consortium(tmp_path, 0, 32, SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.csv"], "none.csv does not exist"),
        (["m.csv", "--splits", "9"], "Set --splits to 20 or more"),
        (["m.csv", "--seeds", "4-1"], "the range 4-1 is empty"),
        (["m.csv", "--set", "method.name=fedavg"], "fedavg"),
    ],
)
def test_bad_input_ends_the_audit_before_it_starts(fedsir: Any, arguments: list[str], says: str) -> None:
    ended = fedsir.call("audit", *arguments, "--phantom", "--set", "execution.actors=in-process")
    assert ended.code == 2, ended.err
    assert says in ended.err


def test_review_needs_the_folder_of_an_audit(fedsir: Any, tmp_path: Path) -> None:
    ended = fedsir.call("audit-review", str(tmp_path), "graded.csv")
    assert ended.code == 2
    assert "is not the folder of an audit" in ended.err


def test_study_refuses_unknown_scenarios(fedsir: Any) -> None:
    assert "Choose among example, clean" in fedsir.call("study", "audit", "nonsense").err
    assert "--root" in fedsir.call("study", "audit", "kermany").err


def test_manifests_without_sites_cannot_be_audited(fedsir: Any, tmp_path: Path) -> None:
    write_consortium(tmp_path / "example", 0, 32, SMALL)
    manifest = tmp_path / "example" / "manifest.csv"
    rows = [line.rsplit(",", 1)[0] for line in manifest.read_text().splitlines()]
    manifest.write_text("\n".join(rows))
    ended = fedsir.call("audit", str(manifest), "--phantom", "--set", "execution.actors=in-process")
    assert ended.code == 2
    assert "no column site" in ended.err


@pytest.mark.slow
def test_an_audit_writes_page_worklist_and_summary_and_reads_a_review_back(fedsir: Any, tmp_path: Path) -> None:
    folder = tmp_path / "<b>example"
    layout = [PhantomSite(f"<i>{n}", patients=36, wrong=0.5 if n == "b" else 0.0) for n in "abcde"]
    write_consortium(folder, 0, 32, layout)
    settings = ["execution.actors=in-process", "data.image_size=32", "training.rounds=3", "training.local_epochs=1"]
    options = [word for s in settings for word in ("--set", s)]
    quick = ["--splits", "59", "--seeds", "0", "--stage-one-splits", "1", "--training-seeds", "0"]
    ended = fedsir.call("audit", str(folder / "manifest.csv"), "--phantom", "--out", "out", *quick, *options)
    assert ended.code == 0, ended.err
    out = tmp_path / "out"
    summary = json.loads((out / "audit.json").read_text())
    verdicts = {site["name"]: site["verdict"] for site in summary["sites"]}
    assert verdicts["<i>b"] == "suspect"
    assert "suspect" not in [v for name, v in verdicts.items() if name != "<i>b"]
    page = (out / "audit.html").read_text()
    assert "nothing here changes a clinical record" in " ".join(page.split())
    assert "<i>b" not in page
    assert "&lt;i&gt;b" in page
    assert "phantom images" in page
    assert 'src="http' not in page

    entries = read_worklist(out / "worklist.csv")
    assert entries
    assert {e.site for e in entries} == {"<i>b"}
    with (folder / "truth.csv").open(newline="") as file:
        truth = {row["path"]: row["true_label"] for row in csv.DictReader(file)}
    text = (out / "worklist.csv").read_text("utf-8-sig").splitlines()
    filled = [text[0], *(line + truth[e.image] for line, e in zip(text[1:], entries, strict=True))]
    (tmp_path / "graded.csv").write_text("\n".join(filled))
    ended = fedsir.call("audit-review", "out", "graded.csv")
    assert ended.code == 0, ended.err
    measured = json.loads((out / "review.json").read_text())["all sites"]
    right = sum(truth[e.image] == e.proposed for e in entries)
    assert (measured["reviewed"], measured["confirmed"]) == (len(entries), right)
