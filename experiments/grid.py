"""Grid files: which conditions, methods and seeds a sweep runs.

    name: quickstart
    base: demo                                  # preset or run file, see experiments.config
    set: [training.rounds=8]                    # overrides for every run; fedprox.method.mu=0.1 for those of one method
    axes:
      noise:                                    # values that change several keys, or another base
        - {label: symmetric-0.3, set: [federation.noise.type=symmetric, federation.noise.ratio=0.3]}
      alpha: {key: federation.partition.alpha, values: [2.0, 0.5]}
      training.local_epochs: [1, 2]             # short for {key: training.local_epochs, values: [1, 2]}
    exclude:                                    # combinations to leave out
      - {noise: symmetric-0.3, alpha: 0.5}
    methods: [oct_fedsir, oct_fedsir/no_kd, fedavg, all_clean]
    seeds: [0, 1, 2]

A condition is one value of every axis. Overrides apply in the order `set`, axes as listed, command line; then those
for one value of an axis (`kermany.data.root=...`), and last those for one method, its presets not included.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field, ValidationError

from experiments.compare import check_methods
from experiments.config import RunFile, presets
from experiments.validation_errors import explain
from experiments.yaml_files import parse_yaml, read_text
from fedsir.config.base import NonNegativeInt, Section
from fedsir.errors import BadInput
from fedsir.files import is_file
from fedsir.text import shortened

METHOD, SEED = "method", "seed"
"""What a run is chosen by beside the axes."""

Scalar = str | int | float | bool

MAX_CELLS = 100_000
"""Results that one grid may ask for: axes multiply, and more is a slip of the pen."""


class AxisValue(Section):
    """One value of an axis: overrides that all its conditions share, and the base where the axis decides on it."""

    label: str = Field(min_length=1)
    base: str | None = None
    set: tuple[str, ...] = ()

    @property
    def noise_only(self) -> bool:
        """Whether it changes nothing but label noise, so that it does not concern a federation without noise."""
        return self.base is None and bool(self.set) and all(s.strip().startswith("federation.noise") for s in self.set)


class GridFile(Section):
    """A grid as written, its axes spelled out; `load_grid` reads one.

    exclude: combinations of labels by axis (and of `method` and `seed`).
    """

    name: str = Field(min_length=1)
    base: str | None = Field(default=None, description="preset or run file; or given by the values of one axis")
    set: tuple[str, ...] = ()
    axes: dict[str, tuple[AxisValue, ...]] = Field(default_factory=dict)
    exclude: tuple[dict[str, str], ...] = ()
    methods: tuple[str, ...]
    seeds: tuple[NonNegativeInt, ...] = Field(min_length=1)

    def labels(self, axis: str) -> tuple[str, ...]:
        """Labels of the values of an axis, of `method` or of `seed`, in order."""
        if axis == METHOD:
            return self.methods
        if axis == SEED:
            return tuple(str(s) for s in self.seeds)
        return tuple(value.label for value in self.axes[axis])

    def find(self, axis: str, wanted: str, where: str) -> str:
        """The label of an axis that `wanted` means; numbers may be written in any way. Raises BadInput."""
        names = [*self.axes, METHOD, SEED]
        if axis not in names:
            raise BadInput(f"{where}: there is no axis {axis!r}.{_hint(axis, names)}\nAxes: {', '.join(names)}.")
        labels = self.labels(axis)
        for label in labels:
            if wanted == label or (_number(wanted) is not None and _number(wanted) == _number(label)):
                return label
        raise BadInput(
            f"{where}: axis {axis} has no value {wanted!r}.{_hint(wanted, labels)}\nValues: {', '.join(labels)}."
        )


def grids() -> list[str]:
    """Names of the grids that come with the package: the YAML files beside this one."""
    return sorted(
        p.name.removesuffix(".yaml") for p in resources.files("experiments").iterdir() if p.name.endswith(".yaml")
    )


def load_grid(source: str) -> GridFile:
    """Read the name of a shipped grid or a YAML path.

    Bases that are paths are relative to the grid file. Raises BadInput that names file, key, value and remedy.
    """
    if source in grids():
        text, folder = (resources.files("experiments") / f"{source}.yaml").read_text("utf-8"), Path()
    else:
        text, folder = read_text(Path(source), source, "grid", grids()), Path(source).parent
    values = parse_yaml(text, source)
    if not isinstance(values, dict):
        raise BadInput(f"{source}: expected a mapping (name, base, axes, methods, seeds), got {_shown(values)}.")
    reader = _Reader(source)
    spelled_out = {
        **values,
        "axes": reader.axes(values.get("axes", {})),
        "exclude": reader.exclude(values.get("exclude", [])),
    }
    try:
        grid = GridFile.model_validate(spelled_out)
    except ValidationError as error:
        raise BadInput(f"{source}: the grid is not valid.\n{explain(error, GridFile)}") from error
    reader.check(grid)
    return _with_paths(grid, folder)


class _Reader:
    """Spells out and checks what a grid file may abbreviate."""

    def __init__(self, source: str) -> None:
        self._source = source

    def _refuse(self, key: str, demand: str) -> NoReturn:
        raise BadInput(f"{self._source}: the grid is not valid.\n  {key}: {demand}")

    def axes(self, given: object) -> dict[str, list[AxisValue]]:
        if not isinstance(given, Mapping):
            self._refuse("axes", f"must be a mapping (axis: list of values), got {_shown(given)}.")
        return {str(name): self._axis(str(name), value) for name, value in given.items()}

    def _axis(self, name: str, given: object) -> list[AxisValue]:
        where, key = f"axes.{name}", name
        if isinstance(given, Mapping):
            if set(given) != {"key", "values"}:
                self._refuse(where, "must be a list of values, or {key: section.key, values: [...]}.")
            key, given = str(given["key"]), given["values"]
        if not isinstance(given, list) or not given:
            self._refuse(where, f"must be a list of at least one value, got {_shown(given)}.")
        return [self._value(where, key, number, value) for number, value in enumerate(given, 1)]

    def _value(self, where: str, key: str, number: int, value: object) -> AxisValue:
        if isinstance(value, Mapping):
            try:
                return AxisValue.model_validate(value)
            except ValidationError as error:
                faults = explain(error, AxisValue, f"{where} (value {number}), ")
                raise BadInput(f"{self._source}: the grid is not valid.\n{faults}") from error
        if not isinstance(value, Scalar) or value == "":
            self._refuse(where, f"value {number} must be a single value or {{label: ..., set: [...]}}.")
        return AxisValue(label=_label(value), set=(f"{key}={json.dumps(value)}",))

    def exclude(self, given: object) -> list[dict[str, str]]:
        if not isinstance(given, list):
            self._refuse("exclude", f"must be a list of combinations such as {{axis: value}}, got {_shown(given)}.")
        for number, combination in enumerate(given, 1):
            single = isinstance(combination, Mapping) and all(isinstance(v, Scalar) for v in combination.values())
            if not single or not combination:
                self._refuse("exclude", f"item {number} must be a combination {{axis: value, ...}}.")
        return [{str(axis): _label(value) for axis, value in combination.items()} for combination in given]

    def check(self, grid: GridFile) -> None:
        """Everything that concerns several keys at once."""
        check_methods(grid.methods, f"{self._source}: methods")
        if len(set(grid.seeds)) < len(grid.seeds):
            self._refuse("seeds", f"give each seed once, got {_shown(grid.seeds)}.")
        for name, values in grid.axes.items():
            if name in (METHOD, SEED):
                self._refuse(f"axes.{name}", f"list them under `{name}s` instead.")
            labels = [value.label for value in values]
            for label in labels:
                if labels.count(label) > 1:
                    self._refuse(f"axes.{name}", f"give each value once, {label!r} is there twice.")
                if label in grid.methods:
                    self._refuse(f"axes.{name}", f"the label {label!r} is a method; use another word.")
                if label.partition(".")[0] in RunFile.model_fields:
                    self._refuse(f"axes.{name}", f"the label {label!r} is a key of run files; use another word.")
        cells = math.prod(map(len, (*grid.axes.values(), grid.methods, grid.seeds)))
        if cells > MAX_CELLS:
            self._refuse("axes", f"values, methods and seeds multiply to {cells:,} results, at most {MAX_CELLS:,}.")
        deciding = [name for name, values in grid.axes.items() if any(v.base is not None for v in values)]
        if (grid.base is not None) + len(deciding) != 1:
            self._refuse(
                "base", f"give it once: at the top or in the values of one axis. Presets: {', '.join(presets())}."
            )
        for name in deciding:
            if any(value.base is None for value in grid.axes[name]):
                self._refuse(f"axes.{name}", "either every value has a base or none.")
        for number, combination in enumerate(grid.exclude, 1):
            for axis, label in combination.items():
                grid.find(axis, label, f"{self._source}: exclude, item {number}")


def _with_paths(grid: GridFile, folder: Path) -> GridFile:
    """Bases that are paths, seen from where the command runs."""

    def seen(base: str | None) -> str | None:
        # A name that is neither is left as it is, for the message that it is unknown.
        if base is None or base in presets() or not is_file(folder / base):
            return base
        return str(folder / base)

    axes = {
        name: tuple(value.model_copy(update={"base": seen(value.base)}) for value in values)
        for name, values in grid.axes.items()
    }
    return grid.model_copy(update={"base": seen(grid.base), "axes": axes})


def _label(value: Scalar) -> str:
    """2.0 as `2`, true as `true`."""
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _hint(given: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _shown(value: Any) -> str:
    return shortened(json.dumps(value, default=str), 60)
