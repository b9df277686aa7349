"""Which runs `fedsir compare` makes of one run file."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.config import RunFile, load_run_file
from fedsir.config.method import MethodConfig
from fedsir.errors import BadInput
from fedsir.methods.registry import find_method, find_preset, method_names

ALL_CLEAN = "all_clean"
"""Not a method: FedAvg on the same federation without noise, the upper reference."""

MAX_SEEDS = 1000


def parse_methods(text: str) -> list[str]:
    """Labels from `oct_fedsir,oct_fedsir/no_kd,fedavg`. Raises BadInput for unknown and repeated ones."""
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    check_methods(chosen, f"--methods {text}".strip())
    return chosen


def check_methods(chosen: Sequence[str], where: str) -> None:
    """Raise BadInput, which begins with `where`, unless `chosen` are known labels, each of them once."""
    known = [*method_names(), ALL_CLEAN]
    if not chosen:
        raise BadInput(f"{where}: name at least one of {', '.join(known)}.")
    for label in chosen:
        name, slash, preset = label.partition("/")
        if name in known and slash:
            find_preset("fedavg" if name == ALL_CLEAN else name, preset)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise BadInput(f"{where}: there is no method {name!r}.{hint}\nKnown: {', '.join(known)}.")
    if len(set(chosen)) < len(chosen):
        raise BadInput(f"{where}: name each method once.")


def parse_seeds(text: str) -> list[int]:
    """Numbers from `0,1,2`, `0-4` or a mixture. Raises BadInput for anything else and for repetitions."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part.strip())
        if match is None:
            raise BadInput(f"--seeds {text!r}: expected numbers such as 0,1,2 or a range such as 0-4.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise BadInput(f"--seeds {text!r}: the range {part.strip()} is empty; write the smaller number first.")
        if last - first >= MAX_SEEDS:
            raise BadInput(f"--seeds {text!r}: {last - first + 1} seeds; at most {MAX_SEEDS} can be compared.")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise BadInput(f"--seeds {text!r}: give each seed once.")
    return seeds


def variant(
    source: str, overrides: Sequence[str], base: RunFile, method: str, seed: int, own: Sequence[str] = ()
) -> RunFile:
    """The run file of another method and seed on the same federation.

    Settings that file and overrides have for a method apply to it and its presets; what a preset changes wins. Of
    these, methods of the same family share what is about images and budget rather than about the method: how stage I
    trains, and in which rounds labels are corrected. Otherwise a method has its defaults. own: overrides that are meant
    for this method alone; they win over everything.
    """
    others = [o for o in overrides if not re.match(r"\s*method\s*[.=]", o)]
    seeded = f"seed={seed}"
    if method == ALL_CLEAN:
        # Without the ratio and map of the noise that is not there: one run for all noise settings.
        reference = ["method.name=fedavg", "federation.noise={type: none}"]
        return load_run_file(source, [*others, seeded, *reference, *own])
    name, _, preset = method.partition("/")
    # A label means what it says: neither the file's preset nor a setting of the file may take its place.
    chosen = [f"method.name={name}", f"method.preset={preset or 'null'}"]
    given = overrides if name == base.method.name else others
    shared = [] if name == base.method.name else _settings("method", _family(base.method, find_method(name).config))
    changes = _settings("method", find_preset(name, preset)) if preset else []
    return load_run_file(source, [*given, seeded, *chosen, *shared, *changes, *own])


def _family(given: MethodConfig, other: type[MethodConfig]) -> dict[str, Any]:
    """Settings written for one method that hold for another one of its family."""
    # With torch, beside whose loading Ray starts: not when this module is imported.
    from fedsir.methods.spectral_settings import SpectralConfig
    from fedsir.methods.stage_one import IdentifyingConfig

    shared: dict[str, Any] = {}
    written = given.model_dump(mode="json", exclude_unset=True)
    of_preset = find_preset(given.name, given.preset) if given.preset else {}
    if isinstance(given, IdentifyingConfig) and issubclass(other, IdentifyingConfig):
        shared["stage_one"] = _without(written.get("stage_one", {}), of_preset.get("stage_one", {}))
    if isinstance(given, SpectralConfig) and issubclass(other, SpectralConfig):
        schedule = {k: v for k, v in written.get("relabeling", {}).items() if k in ("first", "every")}
        shared["relabeling"] = _without(schedule, of_preset.get("relabeling", {}))
    return shared


def _without(written: Mapping[str, Any], of_preset: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that do not merely come from a preset."""
    return {k: v for k, v in written.items() if k not in of_preset or of_preset[k] != v}


def _settings(key: str, values: Mapping[str, Any]) -> list[str]:
    """Nested values as overrides `key.inner=value`."""
    found: list[str] = []
    for inner, value in values.items():
        if isinstance(value, Mapping):
            found += _settings(f"{key}.{inner}", value)
        else:
            found.append(f"{key}.{inner}={json.dumps(value)}")
    return found
