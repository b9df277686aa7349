"""From a grid to its runs: every cell resolved, equal runs merged, in the order in which they share most."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.compare import ALL_CLEAN, variant
from experiments.config import RunFile, load_run_file, missing_keys
from experiments.grid import METHOD, SEED, AxisValue, GridFile, load_grid
from fedsir.config.data import CohortData, KermanyData, MedMnistData
from fedsir.errors import BadInput
from mlflow_tracking.config import TrackingConfig, shown_uri

# Stands for a path that only the user knows, so that a grid can be counted without it.
PLACEHOLDER = "not-given"


@dataclass(frozen=True)
class Cell:
    """One result that the grid asks for. condition: labels of the axes' values, in order of the axes."""

    condition: tuple[str, ...]
    method: str
    seed: int


@dataclass(frozen=True)
class PlannedRun:
    """One run and all cells that its result is for.

    source: preset or file that the run is based on. group: number of the first condition and seed that asks for it;
    runs of a group share images, federation and stage I. missing: settings that must be given before it can run, as
    `--set` takes them.
    """

    identity: str
    config: RunFile
    source: str
    label: str
    group: int
    cells: tuple[Cell, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The runs of a grid, or of the part that was chosen, in the order in which they are run."""

    grid: GridFile
    chosen: Mapping[str, tuple[str, ...]]
    runs: tuple[PlannedRun, ...]

    @property
    def cells(self) -> list[Cell]:
        """Every result that is asked for, by run."""
        return [cell for run in self.runs for cell in run.cells]

    @property
    def missing(self) -> list[str]:
        """Settings that must be given before all of it can run."""
        return list(dict.fromkeys(key for run in self.runs for key in run.missing))

    def shard(self, number: int, of: int) -> Plan:
        """Part `number` (1-based) of `of`: every `of`-th group, so that what a group shares stays together."""
        groups = list(dict.fromkeys(run.group for run in self.runs))
        mine = set(groups[number - 1 :: of])
        return Plan(self.grid, self.chosen, tuple(run for run in self.runs if run.group in mine))


def choose(grid: GridFile, only: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Labels per axis (and of `method` and `seed`) that `--only axis=value` leaves; several of one axis add up.

    Raises BadInput for unknown axes and values.
    """
    wanted: dict[str, set[str]] = {}
    for text in only:
        axis, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise BadInput(f"--only {text}: expected axis=value; axes: {', '.join([*grid.axes, METHOD, SEED])}.")
        wanted.setdefault(axis, set()).add(grid.find(axis, value, f"--only {text}"))
    return {
        axis: tuple(label for label in grid.labels(axis) if axis not in wanted or label in wanted[axis])
        for axis in (*grid.axes, METHOD, SEED)
    }


def expand(grid: GridFile, only: Sequence[str] = (), overrides: Sequence[str] = ()) -> Plan:
    """Resolve every cell that `only` leaves; `overrides` (`key=value`) apply to all of them.

    An override `LABEL.key=value`, where LABEL is a value of an axis, applies to that value's conditions alone:
    `kermany.data.root=/data/OCT2017`. `METHOD.method.key=value` applies to that method alone. Cells whose runs have one
    identity become one run. Reads no images. Raises BadInput that names the cell.
    """
    chosen = choose(grid, only)
    found: dict[str, PlannedRun] = {}
    given = _Overrides.of(grid, overrides)
    for number, condition in enumerate(_conditions(grid, chosen)):
        source = _source(grid, condition)
        for cells, config, missing in _condition_runs(grid, chosen, condition, given):
            for cell in cells:
                of_seed = config.model_copy(update={"seed": cell.seed})
                identity = of_seed.identity()
                if identity in found:
                    known = found[identity]
                    found[identity] = replace(known, cells=(*known.cells, cell))
                    continue
                group = number * len(chosen[SEED]) + chosen[SEED].index(str(cell.seed))
                label = " ".join([*_shown(condition, cell.method), cell.method, f"s{cell.seed}"])
                found[identity] = PlannedRun(identity, of_seed, source, label, group, (cell,), missing)
    if not found:
        raise BadInput("nothing is left to run.\nLeave out --only, or look at `exclude`.")
    # Within a group, runs without noise last: they share nothing with the others but the images.
    order = sorted(found.values(), key=lambda run: (run.group, run.cells[0].method == ALL_CLEAN))
    return Plan(grid, chosen, tuple(order))


def expanded(source: str, only: Sequence[str], overrides: Sequence[str]) -> Plan:
    """The plan of a grid by file or name. Raises BadInput that names the grid."""
    grid = load_grid(source)
    try:
        return expand(grid, only, overrides)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error


def tracking_of(plan: Plan) -> TrackingConfig:
    """The one store of all runs. Raises BadInput where there are several."""
    found = list(dict.fromkeys((r.config.tracking.uri, r.config.tracking.experiment) for r in plan.runs))
    if len(found) > 1:
        shown = ", ".join(f"{shown_uri(uri)} ({experiment})" for uri, experiment in found)
        raise BadInput(
            f"grid {plan.grid.name}: its runs would be recorded in several places: {shown}.\n"
            "Give tracking.uri and tracking.experiment once, under `set` of the grid or with --set."
        )
    return plan.runs[0].config.tracking


def require_complete(plan: Plan) -> None:
    """Raise BadInput where settings or files are missing that a run of the plan needs."""
    if plan.missing:
        settings = " ".join(f"--set {key}=VALUE" for key in plan.missing)
        axis = next((a for a, values in plan.grid.axes.items() if any(v.base for v in values)), None)
        part = "" if axis is None else f"\nOr take a part that needs less: --only {axis}={plan.chosen[axis][0]}."
        raise BadInput(f"grid {plan.grid.name}: {', '.join(plan.missing)} must be set.\nGive {settings}{part}")


def absent_files(plan: Plan) -> list[str]:
    """Paths of images that the plan names but that do not exist, each with the key that names it."""
    found: dict[str, None] = {}
    for run in plan.runs:
        data = run.config.data
        key, path = "data.root", None
        match data:
            case KermanyData():
                path = data.root
            case CohortData():
                key, path = "data.manifest", data.manifest
            case MedMnistData():
                key, path = "data.path", data.path
        if path is not None and path != Path(PLACEHOLDER) and not path.exists():
            found[f"{key} = {path}: there is no such file or folder"] = None
    return list(found)


@dataclass(frozen=True)
class _Overrides:
    """first, last: for every run, before and after those of the axes. scoped: by label of an axis, or by method."""

    first: tuple[str, ...]
    last: tuple[str, ...]
    scoped: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, grid: GridFile, given: Sequence[str]) -> _Overrides:
        """Those of a grid and of a command.

        Raises BadInput where anything but its own settings is to change for one method: all of them have the same data,
        noise and budget.
        """
        axes = {value.label for values in grid.axes.values() for value in values}
        scoped: dict[str, list[str]] = {}
        everywhere: list[list[str]] = []
        for overrides in (grid.set, given):
            everywhere.append([])
            for override in map(str.strip, overrides):
                label = _scope(override, axes | {*grid.methods})
                if label is None:
                    everywhere[-1].append(override)
                    continue
                setting = override.removeprefix(f"{label}.")
                key = setting.partition("=")[0].strip()
                if label not in axes and key in ("method.name", "method.preset"):
                    raise BadInput(
                        f"grid {grid.name}: {override}: results of {label} would be those of another method.\n"
                        "Name that one under `methods` instead."
                    )
                if label not in axes and not key.startswith("method."):
                    raise BadInput(
                        f"grid {grid.name}: {override}: for one method only its own settings can be changed, since all "
                        f"methods share data, noise and budget.\n"
                        f"Write {label}.method.KEY=VALUE, or leave {label} out to change it for all methods."
                    )
                scoped.setdefault(label, []).append(setting)
        first, last = everywhere
        return cls(tuple(first), tuple(last), scoped)

    def of_condition(self, condition: Sequence[AxisValue]) -> list[str]:
        """Those for every method of a condition."""
        axes = [setting for value in condition for setting in value.set]
        return [*self.first, *axes, *self.last, *(s for value in condition for s in self.scoped.get(value.label, ()))]


def _scope(override: str, labels: Collection[str]) -> str | None:
    """The label that an override begins with, the longest of several."""
    return max((label for label in labels if override.startswith(f"{label}.")), key=len, default=None)


def _conditions(grid: GridFile, chosen: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[AxisValue, ...]]:
    axes = [[value for value in values if value.label in chosen[name]] for name, values in grid.axes.items()]
    return itertools.product(*axes)


def _condition_runs(
    grid: GridFile,
    chosen: Mapping[str, tuple[str, ...]],
    condition: tuple[AxisValue, ...],
    given: _Overrides,
) -> Iterator[tuple[list[Cell], RunFile, tuple[str, ...]]]:
    """Per method its cells (one per seed), the run of the first of them and what is missing."""
    deciding = next((value for value in condition if value.base is not None), None)
    source = _source(grid, condition)
    overrides = given.of_condition(condition)
    labels = tuple(value.label for value in condition)
    where = f"condition {', '.join(labels) or '(the only one)'}"
    try:
        lacking = missing_keys(source, overrides)
        overrides += [f"{key}={PLACEHOLDER}" for key in lacking]
        missing = tuple(key if deciding is None else f"{deciding.label}.{key}" for key in lacking)
        base = load_run_file(source, overrides)
        for method in chosen[METHOD]:
            cells = [Cell(labels, method, int(seed)) for seed in chosen[SEED]]
            cells = [cell for cell in cells if not _excluded(grid, cell)]
            if cells:
                own = given.scoped.get(method, ())
                config = variant(source, overrides, base, method, cells[0].seed, own)
                name = "-".join([grid.name, *_shown(condition, method)])
                yield cells, config.model_copy(update={"name": name}), missing
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error


def _source(grid: GridFile, condition: Sequence[AxisValue]) -> str:
    """The base of a condition's runs."""
    source = next((value.base for value in condition if value.base is not None), grid.base)
    assert source is not None  # the grid was checked
    return source


def _excluded(grid: GridFile, cell: Cell) -> bool:
    own = {**dict(zip(grid.axes, cell.condition, strict=True)), METHOD: cell.method, SEED: str(cell.seed)}
    return any(
        all(own[axis] == grid.find(axis, label, "exclude") for axis, label in combination.items())
        for combination in grid.exclude
    )


def _shown(condition: Sequence[AxisValue], method: str) -> list[str]:
    """Labels for people; a run without noise is not named after noise that another condition has."""
    if method != ALL_CLEAN:
        return [value.label for value in condition]
    labels: list[str] = []
    for value in condition:
        if not value.noise_only:
            labels.append(value.label)
        elif "clean" not in labels:
            labels.append("clean")
    return labels if "clean" in labels else [*labels, "clean"]


def parse_shard(text: str) -> tuple[int, int]:
    """(1, 2) from `1/2`. Raises BadInput."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text.strip())
    if match is None or int(match[1]) > int(match[2]):
        raise BadInput(f"--shard {text}: expected part/parts, for example 1/2 and 2/2 for two processes.")
    return int(match[1]), int(match[2])
