"""A cohort of one's own: image files listed in a CSV manifest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedsir.config.data import CohortData
from fedsir.data.catalogue import Catalogue, resolve_overlap
from fedsir.data.dataset import Dataset
from fedsir.data.manifest import LAYOUT, Row, read_manifest
from fedsir.data.messages import count, listing
from fedsir.data.prepare import prepare
from fedsir.data.progress import Progress, silent
from fedsir.data.split import split_patients
from fedsir.errors import BadInput
from fedsir.files import is_folder, user_path
from fedsir.seeding import Stream, generator


def load_cohort(config: CohortData, progress: Progress = silent) -> Dataset:
    """The cohort of a manifest; raises `BadInput` for a manifest or files that cannot be used."""
    catalogue, notes = list_cohort(config)
    name = config.manifest.stem
    catalogue, dropped = resolve_overlap(catalogue, config.on_patient_overlap, name)
    return prepare(catalogue, config, name, (*notes, *dropped), progress)


def list_cohort(config: CohortData) -> tuple[Catalogue, tuple[str, ...]]:
    """The images of a manifest in its order, split by its column or by patients; and notes.

    Patients are told apart by patient_id alone, so an identifier must not mean two people at two sites.
    """
    manifest = user_path(config.manifest, "data.manifest")
    root = manifest.parent if config.root is None else user_path(config.root, "data.root")
    if config.root is not None and not is_folder(root):
        raise BadInput(f"cohort data: the image folder {root} does not exist.\nSet data.root.\n{LAYOUT}")
    known = None if config.classes is None else [label for group in config.classes.values() for label in group]
    rows, notes = read_manifest(manifest, root, known)
    classes = config.classes or {label: (label,) for label in sorted({row.label for row in rows})}
    if len(classes) < 2:
        raise BadInput(f"manifest {manifest} has one label only, {next(iter(classes))}.\nA classifier needs two.")
    notes += [
        f"class {name} is made of the labels {', '.join(group)}" for name, group in classes.items() if group != (name,)
    ]
    index_of = {label: index for index, group in enumerate(classes.values()) for label in group}
    labels = np.array([index_of[row.label] for row in rows], dtype=np.int64)
    ids, patients = np.unique(np.array([row.patient_id for row in rows]), return_inverse=True)
    patients = patients.astype(np.int64)
    is_test, how = _split(config, rows, labels, patients, list(classes))
    catalogue = Catalogue(
        class_names=tuple(classes),
        paths=tuple(root / row.path for row in rows),
        names=tuple(row.path for row in rows),
        labels=labels,
        patients=patients,
        patient_names=tuple(str(value) for value in ids),
        is_test=is_test,
        sites=None if rows[0].site is None else tuple(row.site or "" for row in rows),
    )
    return catalogue, (*notes, how)


def _split(
    config: CohortData,
    rows: Sequence[Row],
    labels: NDArray[np.int64],
    patients: NDArray[np.int64],
    class_names: Sequence[str],
) -> tuple[NDArray[np.bool_], str]:
    if rows[0].split is not None:
        return np.array([row.split == "test" for row in rows], dtype=np.bool_), "split taken from the manifest"
    if not 0 < config.test_fraction < 1:
        raise BadInput(
            f"data.test_fraction is {config.test_fraction:g}, which leaves nothing to "
            f"{'test' if config.test_fraction == 0 else 'train'} on.\n"
            "Set it between 0 and 1, or give the manifest a split column."
        )
    of_class = {name: np.unique(patients[labels == index]) for index, name in enumerate(class_names)}
    scarce = [f"{name}: {count(len(found), 'patient')}" for name, found in of_class.items() if len(found) < 2]
    if scarce:
        raise BadInput(
            listing(
                f"manifest {config.manifest} cannot be split by patients:",
                scarce,
                "Each class needs at least two patients, one to train and one to test on.",
            )
        )
    rng = generator(config.split_seed, Stream.SPLIT)
    is_test = split_patients(labels, patients, config.test_fraction, rng)
    n, total = len(np.unique(patients[is_test])), len(np.unique(patients))
    return is_test, f"split drawn by patients: {n} of {total} for test (data.split_seed {config.split_seed})"
