"""How images are dealt to clients, which clients are noisy and how their labels are corrupted.

Q numbers: fedsir/CHOICES.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fedsir.config.base import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section

NAMED_LABEL_MAPS = ("kermany", "uic_up", "uic_pair_swap", "uic_random_neighbour", "wake_forest")
LabelMapName = Literal["kermany", "uic_up", "uic_pair_swap", "uic_random_neighbour", "wake_forest"]


class PartitionConfig(Section):
    """How images are dealt: class-wise Dirichlet (Q30), or variant `site`, real sites as clients.

    With `site` the manifest's column decides, so the other settings must keep their defaults.
    """

    alpha: PositiveFloat = 2.0
    variant: Literal["multinomial", "split", "site"] = "multinomial"
    unit: Literal["image", "patient"] = "image"
    min_client_size: PositiveInt = 10
    # A large federation is dealt a few hundred times a second: more than this would pass for a hang.
    max_redraws: PositiveInt = Field(default=1000, le=100_000)

    @model_validator(mode="after")
    def _sites_need_no_draw(self) -> PartitionConfig:
        if self.variant == "site":
            fields = type(self).model_fields
            drawn = [n for n, f in fields.items() if n != "variant" and getattr(self, n) != f.default]
            if drawn:
                raise ValueError(f"with variant site the sites decide who holds what: leave out {', '.join(drawn)}")
        return self


class NoiseConfig(Section):
    """Label noise inside noisy clients: eta of each class's images change label (Q27-Q29)."""

    type: Literal["none", "symmetric", "asymmetric"] = "symmetric"
    ratio: Fraction = Field(default=0.6, description="eta: share of each class of a noisy client that is corrupted")
    label_map: LabelMapName | dict[str, str] | None = Field(
        default=None,
        description="asymmetric noise only: a dataset's map, or {class: class it is mistaken for}",
    )
    rounding: Literal["floor", "round"] = "floor"

    @model_validator(mode="after")
    def _asymmetric_needs_a_map(self) -> NoiseConfig:
        if self.type == "asymmetric" and not self.label_map:
            raise ValueError(
                f"asymmetric noise needs noise.label_map: one of {', '.join(NAMED_LABEL_MAPS)} or {{class: class}}"
            )
        return self


class FederationConfig(Section):
    """K clients of which `clean_clients` keep correct labels (Q25, Q26).

    `cover` picks clean clients so that every class has a clean provider with at least
    `cover_min_per_class` images (default min(450, 5 % of the class)); where that takes more clients than
    `clean_clients`, the clean set grows and the federation report says so. `random` draws them.
    """

    clients: PositiveInt = 10
    clean_clients: NonNegativeInt = 2
    public_pool: NonNegativeInt | Literal["auto"] = Field(
        default="auto",
        description="unlabelled images set aside before the partition; auto: 1 % of the training images, at most 512",
    )
    clean_selection: Literal["cover", "random"] = "cover"
    cover_min_per_class: PositiveInt | None = None
    partition: PartitionConfig = PartitionConfig()
    noise: NoiseConfig = NoiseConfig()

    @model_validator(mode="after")
    def _clean_clients_fit(self) -> FederationConfig:
        if self.clean_clients > self.clients:
            raise ValueError(f"clean_clients is {self.clean_clients} but there are only {self.clients} clients")
        return self


__all__ = ["NAMED_LABEL_MAPS", "FederationConfig", "NoiseConfig", "PartitionConfig"]
