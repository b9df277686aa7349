"""Where the images come from and how they are presented to the network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from fedsir.config.base import FiniteFloat, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section

ChannelValue = FiniteFloat | tuple[FiniteFloat, FiniteFloat, FiniteFloat]
ChannelScale = PositiveFloat | tuple[PositiveFloat, PositiveFloat, PositiveFloat]


class TransformConfig(Section):
    """Whole-batch transform: three equal channels, flip while training, `(x / 255 - mean) / std`.

    Defaults are the paper's (mean = std = 0.5); ImageNet statistics are three numbers each.
    """

    mean: ChannelValue = 0.5
    std: ChannelScale = 0.5
    horizontal_flip: bool = True


class ImageSource(Section):
    """What every image source has in common."""

    image_size: PositiveInt = Field(default=128, description="side of the square images in pixels")
    transform: TransformConfig = TransformConfig()


class FileSource(ImageSource):
    """Sources that decode image files once into the uint8 cache."""

    cache_dir: Path | None = Field(default=None, description="default: $FEDSIR_CACHE or ~/.cache/fedsir")
    on_bad_image: Literal["stop", "skip"] = "stop"


class PhantomData(ImageSource):
    """Synthetic B-scans drawn by the package itself; results on them are phantom results."""

    source: Literal["phantom"]
    cohort: Literal["kermany", "uic", "wake_forest"] = "kermany"
    train_images: PositiveInt = 2000
    test_images: PositiveInt = 500
    images_per_patient: PositiveInt = 4
    seed: NonNegativeInt = Field(default=0, description="which cohort of phantoms; not the seed of the run")


class KermanyData(FileSource):
    """Release folder `root/{train,test}/{CNV,DME,DRUSEN,NORMAL}/CLASS-PATIENT-N.jpeg`."""

    source: Literal["kermany"]
    root: Path
    on_patient_overlap: Literal["stop", "drop_from_train"] = "stop"


class CohortData(FileSource):
    """CSV manifest with columns path, label, patient_id and optionally site, eye, visit, volume, split.

    `classes` names the classes in order and the manifest labels that make up each
    (`{GA: [CGA, NCGA], NGA: [NGA]}`); without it every distinct label is a class, sorted by name.
    """

    source: Literal["cohort"]
    manifest: Path
    root: Path | None = Field(default=None, description="folder the paths are relative to; default: the manifest's")
    classes: dict[str, tuple[str, ...]] | None = None
    test_fraction: Fraction = Field(default=0.2, description="of the patients, where the manifest has no split column")
    split_seed: NonNegativeInt = 0
    on_patient_overlap: Literal["stop", "drop_from_train"] = "stop"

    @field_validator("classes")
    @classmethod
    def _classes_are_disjoint(cls, value: dict[str, tuple[str, ...]] | None) -> dict[str, tuple[str, ...]] | None:
        if value is None:
            return None
        if len(value) < 2:
            raise ValueError("needs at least two classes")
        seen: dict[str, str] = {}
        for name, labels in value.items():
            for label in labels:
                if label in seen:
                    raise ValueError(f"label {label!r} is in both {seen[label]!r} and {name!r}")
                seen[label] = name
        return value


class MedMnistData(FileSource):
    """A MedMNIST archive (`octmnist.npz`, `octmnist_128.npz`, ...); train + val train, test tests."""

    source: Literal["medmnist"]
    path: Path


DataConfig = Annotated[PhantomData | KermanyData | CohortData | MedMnistData, Field(discriminator="source")]
