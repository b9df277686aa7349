"""The rules that every loaded data set obeys, and what to tell people about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsir.data.catalogue import check_classes
from fedsir.data.dataset import Dataset, ImageSet
from fedsir.data.messages import count, listing
from fedsir.errors import BadInput


def check_dataset(dataset: Dataset) -> None:
    """Raise `BadInput` where a class is missing from a split or a patient is in both."""
    check_classes(dataset.class_names, dataset.train.labels, dataset.test.labels, dataset.name)
    shared = np.intersect1d(dataset.train.patients, dataset.test.patients)
    if len(shared):
        examples = [dataset.test.names[int(np.argmax(dataset.test.patients == patient))] for patient in shared[:10]]
        shown = [f"the patient of {name}" for name in examples] + [""] * (len(shared) - len(examples))
        raise BadInput(
            listing(
                f"{dataset.name}: {count(len(shared), 'patient')} in train and in test, so the test is not "
                "on unseen people:",
                shown,
                "Mend the split so that each patient is on one side.",
            )
        )


@dataclass(frozen=True)
class SplitDescription:
    """images, patients: how many per class name, in class order; a patient with two labels counts in both."""

    images: Mapping[str, int]
    patients: Mapping[str, int]
    total_images: int
    total_patients: int
    sites: Mapping[str, int] | None


@dataclass(frozen=True)
class DatasetDescription:
    """What `fedsir data inspect` shows; `sites` counts images per site."""

    name: str
    kind: str
    class_names: tuple[str, ...]
    image_size: tuple[int, int]
    train: SplitDescription
    test: SplitDescription
    digest: str
    notes: tuple[str, ...]


def describe(dataset: Dataset) -> DatasetDescription:
    """Counts per class and split, without reading a pixel."""
    height, width = dataset.train.images.shape[1:]
    return DatasetDescription(
        name=dataset.name,
        kind=dataset.kind,
        class_names=dataset.class_names,
        image_size=(int(height), int(width)),
        train=_describe(dataset.train, dataset.class_names),
        test=_describe(dataset.test, dataset.class_names),
        digest=dataset.digest,
        notes=dataset.notes,
    )


def _describe(part: ImageSet, class_names: tuple[str, ...]) -> SplitDescription:
    sites = None
    if part.sites is not None:
        names, counts = np.unique(np.array(part.sites), return_counts=True)
        sites = {str(name): int(n) for name, n in zip(names, counts, strict=True)}
    of_class = [part.labels == index for index in range(len(class_names))]
    return SplitDescription(
        images={name: int(mask.sum()) for name, mask in zip(class_names, of_class, strict=True)},
        patients={name: len(np.unique(part.patients[mask])) for name, mask in zip(class_names, of_class, strict=True)},
        total_images=len(part),
        total_patients=len(np.unique(part.patients)),
        sites=sites,
    )
