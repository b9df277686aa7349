"""What a source knows of its images before any pixel is decoded, and the rules that apply to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsir.data.messages import count, inline, listing
from fedsir.errors import BadInput


@dataclass(frozen=True)
class Catalogue:
    """Image files in the order of the source.

    labels: (N,) int64 class indices. patients: (N,) int64 indices into `patient_names`, shared by both
    splits. is_test: (N,) bool. names: N names to show people. sites: N site names or None.
    """

    class_names: tuple[str, ...]
    paths: tuple[Path, ...]
    names: tuple[str, ...]
    labels: NDArray[np.int64]
    patients: NDArray[np.int64]
    patient_names: tuple[str, ...]
    is_test: NDArray[np.bool_]
    sites: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def keep(self, mask: NDArray[np.bool_]) -> Catalogue:
        """The images where the (N,) mask is true; patient indices stay as they are."""
        chosen = np.flatnonzero(mask)
        return Catalogue(
            class_names=self.class_names,
            paths=tuple(self.paths[i] for i in chosen),
            names=tuple(self.names[i] for i in chosen),
            labels=self.labels[mask],
            patients=self.patients[mask],
            patient_names=self.patient_names,
            is_test=self.is_test[mask],
            sites=None if self.sites is None else tuple(self.sites[i] for i in chosen),
        )


def resolve_overlap(
    catalogue: Catalogue, policy: Literal["stop", "drop_from_train"], source: str
) -> tuple[Catalogue, tuple[str, ...]]:
    """Make patients disjoint between train and test; also a note on what was dropped.

    Raises `BadInput` with the patients where the policy is `stop`.
    """
    shared = np.intersect1d(catalogue.patients[catalogue.is_test], catalogue.patients[~catalogue.is_test])
    if not len(shared):
        return catalogue, ()
    names = [catalogue.patient_names[i] for i in shared]
    if policy == "stop":
        raise BadInput(
            listing(
                f"{source}: {count(len(shared), 'patient')} in train and in test, so the test is not on unseen people:",
                [f"patient {name}" for name in names],
                "Mend the split, or set data.on_patient_overlap to drop_from_train: their train images go.",
            )
        )
    dropped = np.isin(catalogue.patients, shared) & ~catalogue.is_test
    note = (
        f"{count(int(dropped.sum()), 'train image')} left out because their patients are also in test: {inline(names)}"
    )
    return catalogue.keep(~dropped), (note,)


def check_classes(
    class_names: Sequence[str], train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], source: str
) -> None:
    """Raise `BadInput` naming each class that has no image in a split."""
    missing = [
        f"{name}: no {split} image"
        for split, labels in (("train", train_labels), ("test", test_labels))
        for index, name in enumerate(class_names)
        if not np.any(labels == index)
    ]
    if missing:
        raise BadInput(
            listing(
                f"{source} lacks images of {'a class' if len(missing) == 1 else 'some classes'}:",
                missing,
                "Every class needs images in train and in test; add them or take the class out.",
            )
        )
