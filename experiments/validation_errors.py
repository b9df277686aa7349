"""Validation errors in the user's own terms: path of the key, value, what is allowed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fedsir.text import shortened

# Pydantic's error types in plain words; braces are filled from the error's context.
_WORDS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "path_type": "must be a path",
    "literal_error": "must be {expected}",
    "dict_type": "must be a mapping (key: value)",
    "model_type": "must be a section (key: value)",
    "model_attributes_type": "must be a section (key: value)",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "too_long": "has too many items",
    "invalid_key": "a key must be a word",
    "missing": "must be given",
}
_MAX_VALUE = 60


@dataclass(frozen=True)
class _Fault:
    """value: as the user could have written it, or empty where the key alone says enough."""

    value: str
    demand: str


@dataclass(frozen=True)
class _Place:
    """path: key as the user wrote it. section: what the last key belongs to. within: entry of a value that is
    itself a mapping or list, empty for the value as a whole."""

    path: str
    section: type[BaseModel] | None
    within: str


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """One indented line per faulty key of `model`; `prefix` goes before each path."""
    faults: dict[str, list[_Fault]] = {}
    meanings: dict[str, str] = {}
    for fault in error.errors():
        place = _locate(model, fault["loc"])
        where = prefix + (place.path or "configuration")
        if fault["type"] in ("union_tag_invalid", "union_tag_not_found"):
            where += "." + _discriminator(fault)
        faults.setdefault(where, []).append(_fault(fault, place))
        meanings[where] = _meaning(place) if fault["type"] in _WORDS else ""
    return "\n".join(_line(where, found, meanings[where]) for where, found in faults.items())


def _line(where: str, faults: Sequence[_Fault], meaning: str) -> str:
    """Members of a union each have a demand of their own; the value is the same and said once."""
    value = next((f.value for f in faults if f.value), "")
    first, *others = dict.fromkeys(f.demand for f in faults)
    demands = ", or ".join([first, *(d.removeprefix("must be ") for d in others)])
    note = f" ({meaning})" if meaning else ""
    return f"  {where}{' = ' + value if value else ''}: {demands}{note}".removesuffix(".") + (
        "" if demands.endswith("?") else "."
    )


def _fault(fault: Any, place: _Place) -> _Fault:
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        known = sorted(place.section.model_fields) if place.section is not None else []
        hint = _hint(str(fault["loc"][-1]), known)
        return _Fault("", f"unknown key.{hint} Known keys: {', '.join(known)}")
    if kind == "union_tag_not_found":
        return _Fault("", "must be given")
    if kind == "union_tag_invalid":
        tags = [tag.strip().strip("'") for tag in context["expected_tags"].split(",")]
        return _Fault(_shown(context["tag"]), f"must be one of {', '.join(tags)}.{_hint(context['tag'], tags)}")
    limits = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
    demand = _WORDS[kind].format_map(limits) if kind in _WORDS else str(fault["msg"])
    demand = demand.removeprefix("Value error, ").rstrip(".")
    if place.within:
        return _Fault("", f"{place.within} {demand}")
    # Rules over a whole section name the values they mean; everything else is about the value itself.
    whole_section = kind == "value_error" and isinstance(fault["input"], Mapping)
    return _Fault("" if kind == "missing" or whole_section else _shown(fault["input"]), demand)


def _discriminator(fault: Any) -> str:
    return str(fault["ctx"]["discriminator"]).strip("'")


def _hint(given: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _meaning(place: _Place) -> str:
    """The description of a setting, where it has one; said with demands that do not explain themselves."""
    if place.section is None:
        return ""
    field = place.section.model_fields.get(place.path.rpartition(".")[2])
    return "" if field is None or field.description is None else field.description


def _shown(value: object) -> str:
    """A value as YAML would take it, shortened."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str), _MAX_VALUE)


def _locate(model: type[BaseModel], location: Sequence[str | int]) -> _Place:
    """Where an error is, in keys of the file.

    Pydantic's locations also contain tags of unions and names of types, which are not keys of the file.
    """
    section: type[BaseModel] | None = model
    owner: type[BaseModel] | None = model
    candidates: list[type[BaseModel]] = []
    path: list[str] = []
    for part in location:
        if candidates:
            # A tag that says which member of a union was meant.
            section = next((c for c in candidates if _has_tag(c, str(part))), None)
            candidates, owner = [], section
            continue
        if section is None:
            break
        owner = section
        path.append(str(part))
        if part not in section.model_fields:
            # An unknown key.
            return _Place(".".join(path), owner, "")
        models = list(_models(section.model_fields[str(part)].annotation))
        section = models[0] if len(models) == 1 else None
        candidates = models if len(models) > 1 else []
    else:
        return _Place(".".join(path), owner, "")
    entry = location[-1]
    if isinstance(entry, int):
        return _Place(".".join(path), owner, f"item {entry + 1}")
    # Names of types and of union members look like `dict[str,str]` or `literal[...]`, `int`, `constrained-int`.
    is_type = "[" in entry or entry in _TYPE_NAMES
    return _Place(".".join(path), owner, "" if is_type else entry)


_TYPE_NAMES = ("int", "float", "str", "bool", "constrained-int", "constrained-float", "constrained-str", "path")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _models(argument)


def _has_tag(model: type[BaseModel], tag: str) -> bool:
    return any(tag in get_args(field.annotation) for field in model.model_fields.values())
