"""The configuration of one run: everything that determines its result, and where it executes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import SerializeAsAny, field_validator, model_validator

from fedsir.config.base import NonNegativeInt, Section
from fedsir.config.data import DataConfig
from fedsir.config.federation import FederationConfig
from fedsir.config.method import MethodConfig
from fedsir.config.training import EvaluationConfig, ExecutionConfig, ModelConfig, TrainingConfig
from fedsir.methods.registry import find_method, parse_method_config


class RunConfig(Section):
    """One condition, one method, one seed."""

    name: str = "run"
    seed: NonNegativeInt = 0
    data: DataConfig
    federation: FederationConfig = FederationConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    method: SerializeAsAny[MethodConfig]
    evaluation: EvaluationConfig = EvaluationConfig()
    execution: ExecutionConfig = ExecutionConfig()

    @field_validator("method", mode="before")
    @classmethod
    def _method_by_name(cls, value: Any) -> Any:
        return parse_method_config(value)

    @model_validator(mode="after")
    def _method_can_sample(self) -> RunConfig:
        share, name = self.training.participation, self.method.name
        if share < 1.0 and not find_method(name).partial_participation:
            raise ValueError(
                f"training.participation is {share:g}, but method {name} needs every client in every round: "
                "leave participation out, or choose another method"
            )
        return self

    def identity(self) -> str:
        """16 hex digits that change exactly when something that determines the result changes.

        Where a run executes does not count, except what is known to change bits: threads per client, the
        device asked for, the precision, and fast or compiled arithmetic where it is asked for.
        """
        content = self.model_dump(mode="json", exclude={"name", "execution"})
        content["execution"] = self.execution.model_dump(mode="json", include={"threads", "device", "precision"})
        # Only where they differ from the default: what was recorded before they could be set stays the same run.
        if not self.execution.deterministic:
            content["execution"]["deterministic"] = False
        if self.execution.compile:
            content["execution"]["compile"] = True
        if self.training.participation == 1.0:
            content["training"].pop("participation")
        content["data"].pop("cache_dir", None)
        # A label: what it stands for is in the other settings.
        content["method"].pop("preset", None)
        return _digest(content)

    def condition_identity(self) -> str:
        """16 hex digits, equal for all methods of a condition and seed wherever they may share work.

        Number of rounds, participation and evaluation do not count, but where a run executes does.
        """
        content = self.model_dump(mode="json", exclude={"name", "method", "evaluation"})
        for key in ("rounds", "participation"):
            content["training"].pop(key)
        return _digest(content)


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
