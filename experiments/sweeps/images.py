"""How many images a run has and which classes, as far as that can be known without decoding one."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from experiments.expansion import PLACEHOLDER, PlannedRun
from fedsir.config.data import CohortData, KermanyData, MedMnistData, PhantomData
from fedsir.data.manifest import MAX_FILE_BYTES
from fedsir.data.phantom.cohorts import COHORTS
from fedsir.errors import BadInput
from fedsir.files import open_regular, user_path

# Classes of the public sets; their loaders name them too, but decode images.
OCT_CLASSES = ("CNV", "DME", "DRUSEN", "NORMAL")

PUBLISHED: Mapping[str, tuple[int, int]] = {"kermany": (108_309, 1_000), "wake_forest": (9_721, 1_792)}
"""Training and test images by preset where there are none yet: the files of the release, which has duplicates, and
what the paper says of its Wake Forest cohort. It gives no number for UIC."""


@dataclass(frozen=True)
class ImageFacts:
    """What the images of a run are.

    train, test: their numbers, None where unknown. classes: in order, None where unknown. origin: how this is known.
    """

    train: int | None
    test: int | None
    classes: tuple[str, ...] | None
    origin: str


def image_facts(run: PlannedRun) -> ImageFacts:
    """Facts about the images of a run: configured, counted on disk or published."""
    data = run.config.data
    match data:
        case PhantomData():
            return ImageFacts(data.train_images, data.test_images, COHORTS[data.cohort].class_names, "phantoms")
        case KermanyData():
            return _counted(run.source, data.root, OCT_CLASSES, _in_release)
        case MedMnistData():
            return _counted(run.source, data.path, OCT_CLASSES, _in_archive)
        case CohortData():
            classes = None if data.classes is None else tuple(data.classes)
            return _counted(run.source, data.manifest, classes, lambda path: _in_manifest(path, data.test_fraction))


def _counted(
    source: str, path: Path, classes: tuple[str, ...] | None, count: Callable[[Path], tuple[int, int]]
) -> ImageFacts:
    if path != Path(PLACEHOLDER):
        try:
            train, test = count(user_path(path, "data"))
        except (BadInput, OSError, ValueError, csv.Error):
            # What is wrong with it is for the loader to say; a plan only cannot count.
            return ImageFacts(None, None, classes, "not readable")
        return ImageFacts(train, test, classes, "counted, before duplicates are dropped")
    train_test = PUBLISHED.get(source)
    if train_test is None:
        return ImageFacts(None, None, classes, "not given")
    return ImageFacts(*train_test, classes, "as published")


@cache
def _in_release(root: Path) -> tuple[int, int]:
    def files(split: str) -> int:
        return sum(entry.is_file() for name in OCT_CLASSES for entry in os.scandir(root / split / name))

    return files("train"), files("test")


@cache
def _in_archive(path: Path) -> tuple[int, int]:
    # Here, since it brings along what decodes pictures, which no other plan needs.
    from fedsir.data.medmnist import count_images

    counts = count_images(path)
    return counts["train"], counts["test"]


@cache
def _in_manifest(path: Path, test_fraction: float) -> tuple[int, int]:
    with open_regular(path, MAX_FILE_BYTES) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        splits = [(row.get("split") or "").strip() for row in csv.DictReader(text, strict=True)]
    if not any(splits):
        # Patients are divided, not images; their numbers of images even out.
        test = round(test_fraction * len(splits))
        return len(splits) - test, test
    return len(splits) - splits.count("test"), splits.count("test")
