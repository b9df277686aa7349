"""Names of the methods; third parties add theirs through the entry point group `fedsir.methods`.

An entry is a `MethodEntry`: its configuration class, the function that builds the method, and one line for people.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from fedsir.config.method import MethodConfig
from fedsir.errors import BadInput

if TYPE_CHECKING:
    from fedsir.methods.base import Method

GROUP = "fedsir.methods"

# Modules are imported when first asked for: each defines `METHOD`, a MethodEntry.
BUILT_IN = {
    "fedavg": "fedsir.methods.fedavg",
    "oct_fedsir": "fedsir.methods.oct_fedsir",
}


@dataclass(frozen=True)
class MethodEntry:
    """One registered method."""

    config: type[MethodConfig]
    build: Callable[[Any], Method[Any]]
    summary: str
    source: str


def method_names() -> list[str]:
    """All names, built-in ones first."""
    return [*BUILT_IN, *sorted(e.name for e in entry_points(group=GROUP) if e.name not in BUILT_IN)]


def find_method(name: str) -> MethodEntry:
    """The entry of a method. Raises BadInput for unknown names and for plugins that cannot be loaded."""
    if name in BUILT_IN:
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
    """Turn `oct_fedsir`, `{name: oct_fedsir, ...}` or a ready configuration into the method's own class.

    Raises ValueError (as configuration validation expects) for unknown names and pydantic's error for settings.
    """
    if isinstance(value, MethodConfig):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError("expected the name of a method, or a mapping with the key `name`")
    try:
        entry = find_method(value["name"])
    except BadInput as error:
        raise ValueError(str(error)) from error
    return entry.config.model_validate(dict(value))
