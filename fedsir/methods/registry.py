"""Names of the methods; third parties add theirs through the entry point group `fedsir.methods`.

An entry is a `MethodEntry`: its configuration class, the function that builds the method, and one line for people.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from fedsir.config.method import MethodConfig
from fedsir.errors import BadInput
from fedsir.loading import loading
from fedsir.methods.cost import CostOf

if TYPE_CHECKING:
    from fedsir.methods.base import Method

GROUP = "fedsir.methods"

# Modules are imported when first asked for: each defines `METHOD`, a MethodEntry.
BUILT_IN = {
    name: f"fedsir.methods.{name}"
    for name in (
        "fedavg",
        "fedprox",
        "rofl",
        "rhfl",
        "fedlsr",
        "fedcorr",
        "fedned",
        "fedelc",
        "fednoro",
        "fedsir",
        "spectral_pruning",
        "oct_fedsir",
    )
}


@dataclass(frozen=True)
class MethodEntry:
    """One registered method.

    presets: named variants, `name/preset`, as settings that differ from the defaults. cost: how much work a run is;
    without it plans take the method for FedAvg, and say so. partial_participation: its rounds train the clients that
    `fedsir.methods.local.participants` draws; without it `training.participation` below 1 is refused.
    """

    config: type[MethodConfig]
    build: Callable[[Any], Method[Any]]
    summary: str
    source: str
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cost: CostOf | None = None
    partial_participation: bool = False


def method_names() -> list[str]:
    """All names, built-in ones first."""
    return [*BUILT_IN, *sorted(e.name for e in entry_points(group=GROUP) if e.name not in BUILT_IN)]


def find_method(name: str) -> MethodEntry:
    """The entry of a method. Raises BadInput for unknown names and for plugins that cannot be loaded."""
    if name in BUILT_IN:
        with loading():
            entry = import_module(BUILT_IN[name]).METHOD
    else:
        plugins = {e.name: e for e in entry_points(group=GROUP)}
        if name not in plugins:
            known = method_names()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise BadInput(f"method.name: there is no method {name!r}.{hint}\nKnown: {', '.join(known)}.")
        try:
            entry = plugins[name].load()
        except Exception as error:  # a plugin may fail in any way; the cause is kept
            raise BadInput(f"method {name!r} from {plugins[name].value} cannot be loaded: {error}") from error
    if not isinstance(entry, MethodEntry):
        raise BadInput(f"method {name!r}: expected a MethodEntry, got {type(entry).__name__}.")
    return entry


def parse_method_config(value: object) -> MethodConfig:
    """Turn `oct_fedsir`, `oct_fedsir/no_kd`, `{name: oct_fedsir, ...}` or a ready configuration into its own class.

    Settings given beside a preset win over those of the preset. Raises ValueError (as configuration validation
    expects) for unknown names and pydantic's error for settings.
    """
    if isinstance(value, MethodConfig):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError("expected the name of a method, or a mapping with the key `name`")
    name, slash, variant = value["name"].partition("/")
    settings = {**value, "name": name}
    if slash:
        if settings.get("preset") not in (None, variant):
            raise ValueError(f"name says preset {variant!r} and preset says {settings['preset']!r}")
        settings["preset"] = variant
    try:
        entry = find_method(name)
        preset = {} if settings.get("preset") is None else find_preset(name, settings["preset"])
    except BadInput as error:
        raise ValueError(str(error)) from error
    return entry.config.model_validate(_merged(preset, settings))


def find_preset(name: str, preset: object) -> Mapping[str, Any]:
    """Settings of a named variant. Raises BadInput for unknown ones."""
    known = find_method(name).presets
    if not isinstance(preset, str) or preset not in known:
        near = difflib.get_close_matches(str(preset), known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise BadInput(f"method.preset: {name} has no preset {preset!r}.{hint}\nKnown: {', '.join(known) or 'none'}.")
    return known[preset]


def _merged(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings of `preset` with those of `given` on top."""
    out = dict(preset)
    for key, value in given.items():
        below = out.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        out[key] = _merged(below, value) if both and isinstance(below, Mapping) else value
    return out
