"""One door to every source of images."""

from __future__ import annotations

from fedsir.config.data import CohortData, DataConfig, KermanyData, MedMnistData
from fedsir.data.check import check_dataset
from fedsir.data.cohort import load_cohort
from fedsir.data.dataset import Dataset
from fedsir.data.kermany import load_kermany
from fedsir.data.medmnist import load_medmnist
from fedsir.data.progress import Progress, silent
from fedsir.errors import BadInput, first_line

MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 16, 2048


def load_dataset(config: DataConfig, progress: Progress | None = None) -> Dataset:
    """The images that `config` names, decoded and checked; from the cache where they were prepared before.

    Raises `BadInput` with everything that is wrong with paths, files, manifest or cache folder.
    """
    if config.image_size < MIN_IMAGE_SIZE:
        raise BadInput(
            f"data.image_size is {config.image_size}; the networks need {MIN_IMAGE_SIZE} or more.\n"
            "Set it to 128, as in the paper, or 64 for speed."
        )
    if config.image_size > MAX_IMAGE_SIZE:
        raise BadInput(
            f"data.image_size is {config.image_size}; images have at most {MAX_IMAGE_SIZE} pixels a side, more than "
            "scans do.\nSet it to 128, as in the paper."
        )
    try:
        dataset = _load(config, progress or silent)
    except MemoryError as error:
        raise BadInput(
            f"the images of data.source {config.source} do not fit into memory at {config.image_size} pixels a side: "
            f"{first_line(error)}.\nSet a smaller data.image_size or fewer images, or run where more memory is free."
        ) from error
    check_dataset(dataset)
    return dataset


def _load(config: DataConfig, progress: Progress) -> Dataset:
    if isinstance(config, KermanyData):
        return load_kermany(config, progress)
    if isinstance(config, CohortData):
        return load_cohort(config, progress)
    if isinstance(config, MedMnistData):
        return load_medmnist(config, progress)
    # Not at the top: drawing phantoms needs packages that loading files does not.
    from fedsir.data.phantom import load_phantom

    return load_phantom(config)
