from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsir.config.data import KermanyData
from fedsir.data.kermany import list_kermany, load_kermany
from fedsir.errors import BadInput

Save = Callable[[Path, int], Path]


def config(root: Path, cache: Path, **more: object) -> KermanyData:
    return KermanyData.model_validate({"source": "kermany", "root": root, "image_size": 16, "cache_dir": cache, **more})


def test_a_release_folder_is_read_in_class_and_name_order(kermany: Path, cache: Path) -> None:
    found = load_kermany(config(kermany, cache))
    assert found.class_names == ("CNV", "DME", "DRUSEN", "NORMAL")
    assert (found.name, found.kind, found.notes) == ("kermany", "real", ())
    assert found.train.images.shape == (16, 16, 16)
    assert found.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert found.train.names[0] == "train/CNV/CNV-100-1.jpeg"
    assert found.test.names[3] == "test/NORMAL/NORMAL-303-1.jpeg"
    assert len(np.unique(found.train.patients)) == 8
    with Image.open(kermany / found.test.names[3]) as image:
        expected = np.array(image.resize((16, 16), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(found.test.images[3], expected)


def test_patients_are_grouped_by_number_alone(kermany: Path, save: Save) -> None:
    save(kermany / "train" / "DME" / "DME-0100-7.jpeg", 50)
    catalogue, _ = list_kermany(kermany)
    patient = dict(zip(catalogue.names, catalogue.patients.tolist(), strict=True))
    assert patient["train/DME/DME-0100-7.jpeg"] == patient["train/CNV/CNV-100-1.jpeg"]
    assert patient["train/DME/DME-101-1.jpeg"] != patient["train/CNV/CNV-100-1.jpeg"]


def test_litter_and_val_are_ignored(kermany: Path) -> None:
    for name in (".DS_Store", "Thumbs.db", "._CNV-100-1.jpeg"):
        (kermany / "train" / "CNV" / name).write_text("")
    (kermany / "train" / ".cache").mkdir()
    (kermany / "val").mkdir()
    catalogue, notes = list_kermany(kermany)
    assert len(catalogue) == 20
    assert notes == ("folder val of the release is not used",)


def test_a_patient_in_both_splits_stops_by_default(kermany: Path, cache: Path, save: Save) -> None:
    save(kermany / "train" / "DME" / "DME-300-1.jpeg", 60)
    with pytest.raises(BadInput, match=r"(?s)1 patient in train and in test.*patient 300.*drop_from_train"):
        load_kermany(config(kermany, cache))


def test_many_shared_patients_are_counted(kermany: Path, cache: Path, save: Save) -> None:
    for patient in range(400, 412):
        save(kermany / "train" / "DME" / f"DME-{patient}-1.jpeg", patient)
        save(kermany / "test" / "CNV" / f"CNV-{patient}-1.jpeg", 100 + patient)
    with pytest.raises(BadInput, match=r"(?s)patient 409\n.*2 more \(12 in all\)"):
        load_kermany(config(kermany, cache))


def test_shared_patients_can_be_dropped_from_train(kermany: Path, cache: Path, save: Save) -> None:
    save(kermany / "train" / "DME" / "DME-300-1.jpeg", 60)
    found = load_kermany(config(kermany, cache, on_patient_overlap="drop_from_train"))
    assert "train/DME/DME-300-1.jpeg" not in found.train.names
    assert len(found.test) == 4
    assert found.notes == ("1 train image left out because their patients are also in test: 300",)
    assert not np.intersect1d(found.train.patients, found.test.patients).size


def test_equal_pixels_are_dropped_and_reported(kermany: Path, cache: Path) -> None:
    def copy(source: str, target: str) -> None:
        shutil.copy(kermany / source, kermany / target)

    copy("train/CNV/CNV-100-1.jpeg", "train/CNV/CNV-900-1.jpeg")  # within train, another patient
    copy("train/CNV/CNV-100-2.jpeg", "train/NORMAL/NORMAL-901-1.jpeg")  # ... and another label
    copy("test/DME/DME-301-1.jpeg", "test/DME/DME-301-2.jpeg")  # within test
    copy("test/DRUSEN/DRUSEN-302-1.jpeg", "train/DRUSEN/DRUSEN-100-9.jpeg")  # across
    found = load_kermany(config(kermany, cache))
    assert (len(found.train), len(found.test)) == (16, 4)
    assert "train/CNV/CNV-100-1.jpeg" in found.train.names
    assert "test/DRUSEN/DRUSEN-302-1.jpeg" in found.test.names
    assert found.notes == (
        "4 images dropped because another image has the same pixels: 2 within train, 1 within test, "
        "1 from train that are also in test; 3 under another patient, 1 with another label",
    )
    assert load_kermany(config(kermany, cache)).notes == found.notes


def test_equal_pixels_count_whatever_the_file_format(kermany: Path, cache: Path) -> None:
    source = kermany / "train" / "CNV" / "CNV-100-1.jpeg"
    with Image.open(source) as image:
        image.convert("RGB").save(source.with_name("CNV-900-1.png"))
    assert len(load_kermany(config(kermany, cache)).train) == 16


def test_a_class_without_images_is_named(kermany: Path, cache: Path) -> None:
    (kermany / "test" / "DME" / "DME-301-1.jpeg").unlink()
    with pytest.raises(BadInput, match=r"(?s)kermany lacks images of a class.*DME: no test image"):
        load_kermany(config(kermany, cache))


def test_names_that_do_not_tell_patient_and_class_are_listed(kermany: Path, save: Save) -> None:
    save(kermany / "train" / "DME" / "CNV-7-1.jpeg", 70)
    save(kermany / "train" / "DME" / "scan7.png", 71)
    with pytest.raises(BadInput, match=r"(?s)the name says CNV, the folder DME.*scan7.png: not named CLASS"):
        list_kermany(kermany)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no root", r"does not exist.*Expected ROOT/\{train,test\}"),
        ("file", r"is not a folder"),
        ("long name", r"cannot be read: File name too long"),
        ("parent", r'holds neither train nor test.*Set data.root to ".*OCT2017"'),
        ("no class", r"lacks folders:\n  test/DME"),
        ("extra class", r"unknown classes:\n  train/CSR"),
    ],
)
def test_a_wrong_folder_shows_the_layout(kermany: Path, tmp_path: Path, damage: str, message: str) -> None:
    root = kermany
    if damage == "no root":
        root = tmp_path / "nowhere"
    elif damage == "long name":
        root = tmp_path / ("x" * 300)
    elif damage == "file":
        root = kermany / "train" / "CNV" / "CNV-100-1.jpeg"
    elif damage == "parent":
        root = tmp_path
    elif damage == "no class":
        shutil.rmtree(kermany / "test" / "DME")
    else:
        (kermany / "train" / "CSR").mkdir()
    with pytest.raises(BadInput, match=f"(?s){message}"):
        list_kermany(root)
