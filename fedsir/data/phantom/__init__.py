"""Phantom B-scans: synthetic OCT images whose truth is known because they were drawn from it."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from fedsir.config.data import PhantomData
from fedsir.data.cache import SPLITS, Split
from fedsir.data.dataset import Dataset, ImageSet
from fedsir.data.phantom.anatomy import draw_anatomy, draw_placement
from fedsir.data.phantom.cohorts import COHORTS, Cohort, patient_label
from fedsir.data.phantom.kept import kept_or_drawn
from fedsir.data.phantom.rendering import Scan, render
from fedsir.errors import BadInput
from fedsir.seeding import Stream, generator

__all__ = ["MIN_IMAGE_SIZE", "PRETEXT_SEED_START", "draw_patient", "draw_scan", "load_phantom"]

MIN_IMAGE_SIZE = 16
# Seeds from here on belong to the pretext task, so no network has met a phantom that it is tested on.
PRETEXT_SEED_START = 1_000_000


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
    images = kept_or_drawn(config, lambda: _draw_images(config, cohort))
    train = _image_set(config, cohort, 0, images["train"], first_patient=0)
    test = _image_set(config, cohort, 1, images["test"], first_patient=int(train.patients[-1]) + 1)
    return Dataset(
        name=f"phantom-{config.cohort}",
        kind="phantom",
        class_names=cohort.class_names,
        train=train,
        test=test,
        digest=_digest(cohort.class_names, train, test),
        notes=("Images are synthetic phantoms; figures on them are not clinical results.",),
    )


def _draw_images(config: PhantomData, cohort: Cohort) -> dict[Split, NDArray[np.uint8]]:
    size, per_patient = config.image_size, config.images_per_patient
    images: dict[Split, NDArray[np.uint8]] = {}
    for code, (split, count) in enumerate(zip(SPLITS, (config.train_images, config.test_images), strict=True)):
        images[split] = np.empty((count, size, size), dtype=np.uint8)
        for start in range(0, count, per_patient):
            patient = start // per_patient
            _, taken = draw_patient(cohort, config.seed, code, patient, min(per_patient, count - start))
            for number, scan in enumerate(taken):
                images[split][start + number] = draw_scan(scan, cohort, config.seed, code, patient, number, size)
    return images


def _image_set(
    config: PhantomData, cohort: Cohort, split: int, images: NDArray[np.uint8], first_patient: int
) -> ImageSet:
    patients, numbers = np.divmod(np.arange(len(images), dtype=np.int64), config.images_per_patient)
    classes = [patient_label(cohort, config.seed, split, patient) for patient in range(int(patients[-1]) + 1)]
    labels = np.array(classes, dtype=np.int64)[patients]
    patients += first_patient
    names = tuple(f"{SPLITS[split]}/p{p - first_patient:04d}/s{n}" for p, n in zip(patients, numbers, strict=True))
    for array in (images, labels, patients):
        array.flags.writeable = False
    return ImageSet(images=images, labels=labels, patients=patients, names=names)


def _digest(class_names: tuple[str, ...], *splits: ImageSet) -> str:
    """sha256 over class names, shapes, pixels and labels."""
    digest = hashlib.sha256("\n".join(class_names).encode())
    for split in splits:
        digest.update(repr(split.images.shape).encode())
        digest.update(split.images.tobytes())
        digest.update(split.labels.tobytes())
    return digest.hexdigest()
