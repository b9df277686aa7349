"""Phantom B-scans: synthetic OCT images whose truth is known because they were drawn from it."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from fedsir.config.data import PhantomData
from fedsir.data.dataset import Dataset, ImageSet
from fedsir.data.phantom.anatomy import draw_anatomy, draw_placement
from fedsir.data.phantom.cohorts import COHORTS, Cohort, patient_label
from fedsir.data.phantom.rendering import Scan, render
from fedsir.errors import BadInput
from fedsir.seeding import Stream, generator

__all__ = ["MIN_IMAGE_SIZE", "PRETEXT_SEED_START", "draw_patient", "draw_scan", "load_phantom"]

MIN_IMAGE_SIZE = 16
# Seeds from here on belong to the pretext task, so no network has met a phantom that it is tested on.
PRETEXT_SEED_START = 1_000_000
_SPLITS = ("train", "test")


def draw_patient(cohort: Cohort, seed: int, split: int, patient: int, scans: int) -> tuple[int, list[Scan]]:
    """Class and scans of one patient, addressed by (seed, split, patient, scan).

    split: 0 train, 1 test. The scans share anatomy, lesions and scanner; scan s does not depend on `scans`.
    """
    label = patient_label(cohort, seed, split, patient)
    own = generator(seed, Stream.PHANTOM, 1, cohort.code, split, patient)
    anatomy = draw_anatomy(own)
    lesions = cohort.draw(own, label)
    taken = []
    for scan in range(scans):
        rng = generator(seed, Stream.PHANTOM, 2, cohort.code, split, patient, scan)
        taken.append(Scan(anatomy, draw_placement(rng), lesions.seen(rng)))
    return label, taken


def draw_scan(
    scan: Scan, cohort: Cohort, seed: int, split: int, patient: int, number: int, size: int
) -> NDArray[np.uint8]:
    """(size, size) grey values of scan `number` of a patient."""
    return render(scan, size, generator(seed, Stream.PHANTOM, 3, cohort.code, split, patient, number))


def load_phantom(config: PhantomData) -> Dataset:
    """Draw the cohort that `config` describes; train and test patients are different people."""
    if config.image_size < MIN_IMAGE_SIZE:
        raise BadInput(
            f"data.image_size is {config.image_size}; phantom layers vanish below {MIN_IMAGE_SIZE} px. "
            f"Set data.image_size to {MIN_IMAGE_SIZE} or more."
        )
    if config.seed >= PRETEXT_SEED_START:
        raise BadInput(
            f"data.seed is {config.seed}; seeds from {PRETEXT_SEED_START} on are kept for pre-training. "
            f"Set data.seed below {PRETEXT_SEED_START}."
        )
    cohort = COHORTS[config.cohort]
    train = _draw_split(config, cohort, 0, config.train_images, first_patient=0)
    test = _draw_split(config, cohort, 1, config.test_images, first_patient=int(train.patients[-1]) + 1)
    return Dataset(
        name=f"phantom-{config.cohort}",
        kind="phantom",
        class_names=cohort.class_names,
        train=train,
        test=test,
        digest=_digest(cohort.class_names, train, test),
        notes=("Images are synthetic phantoms; figures on them are not clinical results.",),
    )


def _draw_split(config: PhantomData, cohort: Cohort, split: int, count: int, first_patient: int) -> ImageSet:
    size, per_patient = config.image_size, config.images_per_patient
    images = np.empty((count, size, size), dtype=np.uint8)
    labels = np.empty(count, dtype=np.int64)
    patients = np.empty(count, dtype=np.int64)
    names = []
    for start in range(0, count, per_patient):
        patient, scans = start // per_patient, min(per_patient, count - start)
        label, taken = draw_patient(cohort, config.seed, split, patient, scans)
        for number, scan in enumerate(taken):
            images[start + number] = draw_scan(scan, cohort, config.seed, split, patient, number, size)
            names.append(f"{_SPLITS[split]}/p{patient:04d}/s{number}")
        labels[start : start + scans] = label
        patients[start : start + scans] = first_patient + patient
    for array in (images, labels, patients):
        array.flags.writeable = False
    return ImageSet(images=images, labels=labels, patients=patients, names=tuple(names))


def _digest(class_names: tuple[str, ...], *splits: ImageSet) -> str:
    """sha256 over class names, shapes, pixels and labels."""
    digest = hashlib.sha256("\n".join(class_names).encode())
    for split in splits:
        digest.update(repr(split.images.shape).encode())
        digest.update(split.images.tobytes())
        digest.update(split.labels.tobytes())
    return digest.hexdigest()
