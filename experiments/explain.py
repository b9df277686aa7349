"""Validation errors in the user's own terms: path of the key, value, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """One indented line per faulty key of `model`; `prefix` goes before each path."""
    faults: dict[str, list[str]] = {}
    for fault in error.errors():
        path, section = _locate(model, fault["loc"])
        where = prefix + (path or "configuration")
        known = sorted(section.model_fields) if section is not None else []
        faults.setdefault(where, []).append(_sentence(fault, known))
    return "\n".join(f"  {where}{' or '.join(_unique(sentences))}" for where, sentences in faults.items())


def _sentence(fault: Any, known: Sequence[str]) -> str:
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f": unknown key.{hint} Known keys: {', '.join(known)}."
    if fault["type"] == "missing":
        return ": must be given."
    if fault["type"] == "union_tag_not_found":
        return f": the key {fault['ctx']['discriminator']} must be given."
    message = str(fault["msg"]).removeprefix("Value error, ").rstrip(".")
    if isinstance(fault["input"], dict):
        return f": {message}."
    shown = repr(fault["input"])
    return f" = {shown if len(shown) <= 60 else shown[:57] + '...'}: {message}."


def _unique(sentences: Sequence[str]) -> list[str]:
    """Without repetitions; members of a union all name the same value, which is said once."""
    first, *rest = dict.fromkeys(sentences)
    value, _, _ = first.partition(": ")
    return [first, *(r.removeprefix(f"{value}: ") for r in rest)]


def _locate(model: type[BaseModel], location: Sequence[str | int]) -> tuple[str, type[BaseModel] | None]:
    """Path as the user wrote it and the section that the last key belongs to.

    Pydantic's locations also contain tags of unions and names of types, which are not keys of the file.
    """
    section: type[BaseModel] | None = model
    candidates: list[type[BaseModel]] = []
    path: list[str] = []
    owner: type[BaseModel] | None = model
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if candidates:
            # A tag that says which member of a union was meant.
            section = next((c for c in candidates if _has_tag(c, str(part))), None)
            candidates, owner = [], section
            continue
        if section is None:
            if path and isinstance(part, str) and owner is None:
                path.append(part)
            continue
        owner = section
        if part not in section.model_fields:
            if last or isinstance(part, str):
                path.append(str(part))
            section = None
            continue
        path.append(str(part))
        models = list(_models(section.model_fields[str(part)].annotation))
        section = models[0] if len(models) == 1 else None
        candidates = models if len(models) > 1 else []
    return ".".join(path), owner


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _models(argument)


def _has_tag(model: type[BaseModel], tag: str) -> bool:
    return any(tag in get_args(field.annotation) for field in model.model_fields.values())
