"""FedSIR: the predecessor of OCT-FedSIR, as its published code behaves.

Same stages as OCT-FedSIR; the defaults here are the code's choices (point by point: fedsir/CHOICES.md):

- stage I trains by plain cross entropy and takes features from the augmented training loader, classes unbalanced;
- clients are compared by mean and energy alone, with full covariances, and single-class clients count as (0, 0),
  which is the cleanest value possible;
- references weigh a provider by count, gap and share of its first singular value, need 100 images of the class, and
  fall back to the largest provider where the mean has no clear direction;
- distillation follows a ramp up to 0.2 with teacher temperature 0.8, and after the first relabelling concerns only
  images on which the criteria disagree; running statistics count as distance.

The preset `faithful` adds the code's batch size in stage I (that of the rounds is the run's) and its residual bases,
which are always filled up to L directions. Two behaviours are left out: the code stops where no client is clean or a
class has no clean provider; here the guards of OCT-FedSIR act and say so.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsir.config.base import PositiveFloat, PositiveInt
from fedsir.methods.oct_fedsir import OctFedSIR, cost
from fedsir.methods.registry import MethodEntry
from fedsir.methods.spectral_settings import (
    CleanFraction,
    ConstantWeight,
    Distillation,
    LogitAdjustment,
    RampWeight,
    SpectralConfig,
)
from fedsir.methods.stage_one import StageOneSettings
from fedsir.spectral.identification import IdentificationSettings
from fedsir.spectral.references import ReferenceSettings

# Each section is a class of its own, so that naming one setting of it leaves the others at the code's choices.


class FedSIRStageOne(StageOneSettings):
    """Features for the comparison from the training loader."""

    transform: Literal["plain", "train"] = "train"


class FedSIRIdentification(IdentificationSettings):
    """Mean and energy of unbalanced classes, split with full covariances."""

    balance: bool = False
    descriptors: tuple[Literal["mean", "energy", "maximum"], ...] = Field(default=("mean", "energy"), min_length=1)
    no_pairs: Literal["noisy", "zeros", "clean"] = "zeros"
    covariance: Literal["tied", "full"] = "full"
    regularization: PositiveFloat = 1e-6
    clean_component: Literal["mean_score", "first_descriptor"] = "first_descriptor"


class FedSIRReferences(ReferenceSettings):
    """Providers weighted by count and spectrum; weak means are replaced by the largest provider."""

    weight: Literal["n", "n_gap_s1"] = "n_gap_s1"
    min_count: PositiveInt = 100
    strength_threshold: PositiveFloat | None = 0.03


class FedSIRLogitAdjustment(LogitAdjustment):
    """Plain cross entropy in stage I."""

    stage_one: bool = False


class FedSIRDistillation(Distillation):
    """A ramp up to 0.2, a sharpened teacher, heard where the criteria disagree."""

    weight: Annotated[CleanFraction | ConstantWeight | RampWeight, Field(discriminator="kind")] = RampWeight(
        kind="ramp"
    )
    on: Literal["all", "disagree"] = "disagree"
    teacher_temperature: PositiveFloat = 0.8


class FedSIRConfig(SpectralConfig):
    """Settings of FedSIR."""

    name: Literal["fedsir"] = "fedsir"
    stage_one: FedSIRStageOne = FedSIRStageOne()
    identification: FedSIRIdentification = FedSIRIdentification()
    references: FedSIRReferences = FedSIRReferences()
    logit_adjustment: FedSIRLogitAdjustment = FedSIRLogitAdjustment()
    distillation: FedSIRDistillation = FedSIRDistillation()
    distance_buffers: bool = True


METHOD = MethodEntry(
    config=FedSIRConfig,
    build=OctFedSIR,
    summary="spectral identification and relabelling as in the published predecessor of OCT-FedSIR",
    source="FedSIR, CVPR 2026; github.com/sinagh72/FedSIR",
    cost=cost,
    partial_participation=True,
    presets={
        "faithful": {"stage_one": {"batch_size": 64}, "references": {"basis": "filled"}},
        "equal_steps": {"stage_one": {"length": "steps"}},
    },
)
