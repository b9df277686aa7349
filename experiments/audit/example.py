"""An example consortium on disk: images, a manifest as a consortium would write it, and apart from it the truth."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from fedsir.audit.consortium import EXAMPLE, PhantomSite, draw_consortium
from fedsir.data.phantom.cohorts import COHORTS
from fedsir.errors import BadInput

MANIFEST, TRUTH = "manifest.csv", "truth.csv"


def write_consortium(folder: Path, seed: int, size: int, layout: Sequence[PhantomSite] = EXAMPLE) -> tuple[int, int]:
    """Draw a phantom consortium into a new or empty `folder`; returns numbers of images and of wrong labels.

    `truth.csv` has the true label of every image; nothing reads it. Raises BadInput where the folder is in use or
    cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror or error}).\nName another folder.") from error
    if used:
        raise BadInput(f"{folder} is not empty.\nName a new folder.")
    drawn = draw_consortium(tuple(layout), seed, size)
    names = COHORTS["kermany"].class_names
    manifest: list[tuple[str, ...]] = [("path", "label", "patient_id", "site")]
    truth: list[tuple[str, ...]] = [("path", "true_label")]
    counter: dict[int, int] = {}
    for i, pixels in enumerate(drawn.images):
        site, patient = drawn.site_names[drawn.sites[i]], int(drawn.patients[i])
        counter[patient] = counter.get(patient, 0) + 1
        path = f"{site}/{site[:3].upper()}-{patient:04d}-{counter[patient]}.png"
        (folder / site).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / path)
        manifest.append((path, names[drawn.observed[i]], f"{site[:3].upper()}-{patient:04d}", site))
        truth.append((path, names[drawn.true[i]]))
    for name, rows in ((MANIFEST, manifest), (TRUTH, truth)):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
    return len(drawn.images), int((drawn.observed != drawn.true).sum())
