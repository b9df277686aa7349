"""Run files: YAML plus `--set section.key=value`, validated, with errors a person can act on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from experiments.validation_errors import explain
from experiments.yaml_files import MAX_SHOWN, parse_yaml, read_text
from fedsir.config.method import MethodConfig
from fedsir.config.run import RunConfig
from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput
from fedsir.methods.registry import find_method, find_preset, method_names, parse_method_config
from fedsir.text import shortened
from mlflow_tracking.config import TrackingConfig

MISSING = "???"
"""Value of a preset's key that only the user can fill in."""


class RunFile(RunConfig):
    """One run as a user submits it: the run itself and where it is recorded."""

    tracking: TrackingConfig = TrackingConfig()
    work_dir: Path = Path("fedsir-runs")

    def identity(self) -> str:
        """The identity of the run alone: recording it elsewhere does not change a result."""
        return RunConfig.model_validate(self.run_values()).identity()

    def condition_identity(self) -> str:
        """The condition and seed alone, see `RunConfig`."""
        return RunConfig.model_validate(self.run_values()).condition_identity()

    def run_values(self) -> dict[str, Any]:
        """The values that belong to `RunConfig`."""
        return {name: getattr(self, name) for name in RunConfig.model_fields}

    @property
    def checkpoint_file(self) -> Path:
        """Where an interrupted run continues from."""
        return self.work_dir / "checkpoints" / f"{self.identity()}.safetensors"


def file_stem(name: str) -> str:
    """The name of a run as part of a file name: without what would lead to another folder."""
    return re.sub(r"[^\w. -]+|^\.+", "_", name)[:100]


@cache
def presets() -> tuple[str, ...]:
    """Names of the presets that come with the package."""
    folder = resources.files("experiments") / "presets"
    return tuple(sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")))


def load_run_file(source: str, overrides: Sequence[str]) -> RunFile:
    """Read a preset name or YAML path, apply `section.key=value` overrides and validate.

    Raises BadInput with the path of the key, the value and what is allowed.
    """
    values = _filled(source, overrides)
    with _explaining(source):
        if "method" in values:
            # Parsed first, since the class of a method's settings is known only by its name.
            values["method"] = _parse_method(values["method"])
        return RunFile.model_validate(values)


def load_execution(source: str, overrides: Sequence[str]) -> ExecutionConfig:
    """Where a run executes, without the settings of its method, which cannot be read without torch.

    Raises BadInput for whatever else is wrong, as `load_run_file` does.
    """
    values = _filled(source, overrides)
    if "method" in values:
        name = (_label(values["method"]) or "").partition("/")[0]
        values["method"] = MethodConfig(name=name) if name in method_names() else _parse_method(values["method"])
    with _explaining(source):
        return RunFile.model_validate(values).execution


def missing_keys(source: str, overrides: Sequence[str]) -> list[str]:
    """Keys that only the user can fill in and that neither the file nor the overrides give, sorted."""
    return sorted(_unfilled(_overridden(source, overrides)))


def _filled(source: str, overrides: Sequence[str]) -> dict[str, Any]:
    values = _overridden(source, overrides)
    unfilled = sorted(_unfilled(values))
    if unfilled:
        raise BadInput(
            f"{source}: {', '.join(unfilled)} must be set.\n"
            f"For example: --set {unfilled[0]}=VALUE, or a YAML file of your own."
        )
    return values


@contextmanager
def _explaining(source: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise BadInput(f"{source}: the configuration is not valid.\n{explain(error, RunFile)}") from error


def _overridden(source: str, overrides: Sequence[str]) -> dict[str, Any]:
    values = _read(source)
    for override in overrides:
        _apply(values, override)
    return values


def _label(value: object) -> str | None:
    """What the section of the method calls it, `name` or `name/preset`; None where it does not."""
    label = value.get("name") if isinstance(value, Mapping) else value
    return label if isinstance(label, str) else None


def _parse_method(value: object) -> MethodConfig:
    label = _label(value)
    name, slash, preset = (label or "").partition("/")
    if label is not None:
        # These say best what is wrong with a name.
        find_method(name)
        if slash:
            find_preset(name, preset)
    try:
        return parse_method_config(value)
    except ValidationError as error:
        known = find_method(name).config
        raise BadInput(f"the settings of method {name} are not valid.\n{explain(error, known, 'method.')}") from error
    except ValueError as error:
        raise BadInput(f"method = {value!r}: {error}.\nFor example: --set method.name=oct_fedsir.") from error


def _read(source: str) -> dict[str, Any]:
    if source in presets():
        name, text = (
            source,
            (resources.files("experiments") / "presets" / f"{source}.yaml").read_text("utf-8"),
        )
    else:
        path = Path(source)
        name = str(path)
        text = read_text(path, source, "preset", presets())
    values = parse_yaml(text, name)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise BadInput(f"{name}: expected a mapping of sections (data, federation, ...), got {type(values).__name__}.")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    shown = shortened(override, MAX_SHOWN)
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise BadInput(f"--set {shown}: expected section.key=value, for example federation.noise.ratio=0.6.")
    section = values
    for depth, part in enumerate(parts[:-1]):
        if part == "method" and isinstance(section.get(part), str):
            section[part] = {"name": section[part]}
        inner = section.setdefault(part, {})
        if not isinstance(inner, dict):
            raise BadInput(f"--set {shown}: {'.'.join(parts[: depth + 1])} is a value, not a section.")
        section = inner
    value = parse_yaml(text, f"--set {shown}")
    before = section.get(parts[-1])
    if parts[-1] == "name" and parts[:-1] == ["method"] and before not in (None, value):
        # Settings of the method that the file named do not belong to another one, but to its presets they do.
        if str(before).partition("/")[0] != str(value).partition("/")[0]:
            section.clear()
        section.pop("preset", None)
    section[parts[-1]] = value


def _unfilled(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        if value == MISSING:
            found.append(f"{prefix}{key}")
        elif isinstance(value, Mapping):
            found += _unfilled(value, f"{prefix}{key}.")
    return found
