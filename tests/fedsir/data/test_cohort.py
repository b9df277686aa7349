from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedsir.config.data import CohortData
from fedsir.data.cohort import load_cohort
from fedsir.errors import BadInput

Cohort = Callable[..., Path]


def config(manifest: Path, cache: Path, **more: object) -> CohortData:
    return CohortData.model_validate(
        {"source": "cohort", "manifest": manifest, "image_size": 16, "cache_dir": cache, **more}
    )


SPLIT_ROWS = [
    "a/1.png,CGA,p1,train,x",
    "a/2.png,NGA,p2,train,y",
    "a/3.png,NCGA,p3,val,x",
    "a/4.png,NCGA,p4,test,x",
    "a/5.png,NGA,p5,test,y",
]


def test_split_column_class_merge_and_sites(cohort: Cohort, cache: Path) -> None:
    manifest = cohort("path,label,patient_id,split,site", SPLIT_ROWS)
    found = load_cohort(config(manifest, cache, classes={"NGA": ["NGA"], "GA": ["CGA", "NCGA"]}))
    assert (found.name, found.kind, found.class_names) == ("cohort", "real", ("NGA", "GA"))
    assert found.train.names == ("a/1.png", "a/2.png", "a/3.png")
    assert found.train.labels.tolist() == [1, 0, 1]
    assert found.train.sites == ("x", "y", "x")
    assert found.test.labels.tolist() == [1, 0]
    assert found.notes == ("class GA is made of the labels CGA, NCGA", "split taken from the manifest")


def test_without_classes_each_label_is_one(cohort: Cohort, cache: Path) -> None:
    manifest = cohort("path,label,patient_id,split,site", [row.replace("NCGA", "CGA") for row in SPLIT_ROWS])
    found = load_cohort(config(manifest, cache))
    assert found.class_names == ("CGA", "NGA")


def test_patients_are_split_whole_and_repeatably(cohort: Cohort, cache: Path) -> None:
    rows = [f"{i}.png,{'AB'[i // 2 % 2]},p{i // 2}" for i in range(40)] + ["40.png,A,p1"]
    manifest = cohort("path,label,patient_id", rows)
    found = load_cohort(config(manifest, cache))
    assert found.train.sites is None
    assert not np.intersect1d(found.train.patients, found.test.patients).size
    assert len(np.unique(found.test.patients)) == 4
    assert found.notes == ("split drawn by patients: 4 of 20 for test (data.split_seed 0)",)
    assert load_cohort(config(manifest, cache)).digest == found.digest
    assert load_cohort(config(manifest, cache, split_seed=1)).test.names != found.test.names
    assert len(np.unique(load_cohort(config(manifest, cache, test_fraction=0.5)).test.patients)) == 10


def test_images_may_lie_elsewhere(cohort: Cohort, cache: Path, tmp_path: Path) -> None:
    manifest = cohort("path,label,patient_id,split,site", SPLIT_ROWS)
    (tmp_path / "lists").mkdir()
    moved = manifest.rename(tmp_path / "lists" / "study.csv")
    classes = {"GA": ["CGA", "NCGA"], "NGA": ["NGA"]}
    assert load_cohort(config(moved, cache, root=tmp_path, classes=classes)).name == "study"
    with pytest.raises(BadInput, match="5 image files of study cannot be used"):
        load_cohort(config(moved, cache, classes=classes))
    with pytest.raises(BadInput, match=r"nowhere does not exist.\nSet data.root"):
        load_cohort(config(moved, cache, root=tmp_path / "nowhere"))


def test_a_patient_on_both_sides_stops_or_leaves_train(cohort: Cohort, cache: Path) -> None:
    manifest = cohort("path,label,patient_id,split,site", [*SPLIT_ROWS, "a/6.png,CGA,p4,train,x"])
    classes = {"GA": ["CGA", "NCGA"], "NGA": ["NGA"]}
    with pytest.raises(BadInput, match=r"(?s)cohort: 1 patient in train and in test.*patient p4"):
        load_cohort(config(manifest, cache, classes=classes))
    found = load_cohort(config(manifest, cache, classes=classes, on_patient_overlap="drop_from_train"))
    assert len(found.train) == 3
    assert "1 train image left out" in found.notes[-1]


def test_labels_outside_the_classes_are_refused(cohort: Cohort, cache: Path) -> None:
    manifest = cohort("path,label,patient_id,split,site", SPLIT_ROWS)
    with pytest.raises(BadInput, match=r"line 2: label 'CGA' is in none of data\.classes"):
        load_cohort(config(manifest, cache, classes={"GA": ["NCGA"], "NGA": ["NGA"]}))


def test_a_class_without_labels_in_the_manifest_is_named(cohort: Cohort, cache: Path) -> None:
    manifest = cohort("path,label,patient_id,split,site", [row.replace("NCGA", "CGA") for row in SPLIT_ROWS])
    with pytest.raises(BadInput, match=r"(?s)cohort lacks.*MGA: no train image.*MGA: no test image"):
        load_cohort(config(manifest, cache, classes={"CGA": ["CGA"], "NGA": ["NGA"], "MGA": ["MGA"]}))


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (["1.png,A,p1", "2.png,A,p2"], {}, "has one label only, A"),
        (["1.png,A,p1", "2.png,A,p2", "3.png,B,p3"], {}, "B: 1 patient\n"),
        (["1.png,A,p1", "2.png,B,p2"], {"test_fraction": 0.0}, "leaves nothing to test on"),
        (["1.png,A,p1", "2.png,B,p2"], {"test_fraction": 1.0}, "leaves nothing to train on"),
    ],
)
def test_cohorts_that_cannot_be_split(
    cohort: Cohort, cache: Path, rows: list[str], more: dict[str, float], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load_cohort(config(cohort("path,label,patient_id", rows), cache, **more))
