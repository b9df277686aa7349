"""Settings of the spectral family: every choice in which FedSIR, OCT-FedSIR and their ablations differ has a name.

Q numbers: fedsir/CHOICES.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedsir.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from fedsir.methods.stage_one import IdentifyingConfig
from fedsir.spectral.references import ReferenceSettings


class LogitAdjustment(Section):
    """Logit adjustment m = beta log(prior + eps) (eq. 8-10, Q20, Q24)."""

    stage_one: bool = True
    clean_clients: bool = True
    noisy_clients: bool = True
    beta: NonNegativeFloat = 1.0
    eps: PositiveFloat = 1e-12
    floor: NonNegativeFloat = Field(default=1.0, description="counts below are raised to it")
    prior_source: Literal["observed", "corrected"] = "observed"


class CleanFraction(Section):
    """KD weight lambda = predicted-clean clients / clients (paper)."""

    kind: Literal["clean_fraction"] = "clean_fraction"


class ConstantWeight(Section):
    """The same KD weight in every round."""

    kind: Literal["constant"]
    value: Fraction


class RampWeight(Section):
    """KD weight `maximum * exp_ramp(round; begin, end)` (FedSIR's code)."""

    kind: Literal["ramp"]
    maximum: Fraction = 0.2
    begin: NonNegativeInt = 2
    end: PositiveInt = 49

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> RampWeight:
        if self.begin >= self.end:
            raise ValueError(f"a ramp must end after it begins, got begin {self.begin} and end {self.end}")
        return self


class Distillation(Section):
    """Knowledge distillation at predicted-noisy clients (Q17-Q19, Q21)."""

    enabled: bool = True
    weight: Annotated[CleanFraction | ConstantWeight | RampWeight, Field(discriminator="kind")] = CleanFraction()
    on: Literal["all", "disagree"] = Field(
        default="all", description="disagree: before the first relabelling all images, then those in disagreement"
    )
    teacher: Literal["global", "clean"] = "global"
    teacher_temperature: PositiveFloat = 1.0
    student_temperature: PositiveFloat = 1.0


class Relabeling(Section):
    """When and how predicted-noisy clients correct labels (Q10, Q14)."""

    enabled: bool = True
    every: PositiveInt = Field(default=20, description="rounds between checkpoints")
    first: PositiveInt | None = Field(default=None, description="round of the first checkpoint; none: `every`")
    rule: Literal["agree", "sr", "sn"] = "agree"
    keep_unreferenced: bool = True

    def due(self, t: int) -> bool:
        """Whether a checkpoint comes before round t (0-based)."""
        first = self.every if self.first is None else self.first
        return self.enabled and t >= first and (t - first) % self.every == 0


class SpectralConfig(IdentifyingConfig):
    """Settings of OCT-FedSIR and FedSIR; the defaults are OCT-FedSIR's."""

    init_main: Literal["clean_aggregate", "shared_init"] = Field(
        default="clean_aggregate", description="where the main stage starts (Q9)"
    )
    references: ReferenceSettings = ReferenceSettings()
    relabeling: Relabeling = Relabeling()
    logit_adjustment: LogitAdjustment = LogitAdjustment()
    distillation: Distillation = Distillation()
    aggregation: Literal["distance_aware", "sample_weighted"] = "distance_aware"
    distance_buffers: bool = Field(default=False, description="running statistics count as distance (Q22)")
