"""Checkpoints: one safetensors file per run, written atomically, with the structure as JSON in its header."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedsir.errors import BadInput

FORMAT = "1"
Arrays = dict[str, NDArray[Any]]


def encode(value: Any, arrays: Arrays, path: str = "") -> Any:
    """JSON-able structure of nested dataclasses, tuples, mappings and scalars; arrays go to `arrays` by path.

    Raises TypeError for anything else: a state must be plain data.
    """
    if isinstance(value, np.ndarray):
        # A key with a dot may spell the path of another array.
        name = path if path not in arrays else f"{path}#{len(arrays)}"
        arrays[name] = np.ascontiguousarray(value).reshape(value.shape)
        return {"array": name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name), arrays, f"{path}.{f.name}") for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [encode(item, arrays, f"{path}.{i}") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        return {str(key): encode(item, arrays, f"{path}.{key}") for key, item in value.items()}
    raise TypeError(f"a state may not hold {type(value).__name__} (at {path or 'top'})")


def decode(hint: Any, node: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Rebuild what `encode` took apart, guided by the type hint.

    Raises TypeError for structure that the hint does not describe.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        if node is None:
            return None
        return decode(next(a for a in arguments if a is not NoneType), node, arrays)
    if origin is np.ndarray or hint is np.ndarray:
        return arrays[node["array"]]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint)
        return hint(**{name: decode(hints[name], item, arrays) for name, item in node.items()})
    if origin is tuple:
        kinds = [arguments[0]] * len(node) if len(arguments) == 2 and arguments[1] is Ellipsis else arguments
        return tuple(decode(kind, item, arrays) for kind, item in zip(kinds, node, strict=True))
    if origin in (dict, Mapping):
        key_type = int if arguments[0] is int else str
        return {key_type(key): decode(arguments[1], item, arrays) for key, item in node.items()}
    if isinstance(node, (dict, list)):
        raise TypeError(f"{hint} does not say what to make of {type(node).__name__}")
    if hint is float and node is not None:
        return float(node)
    return node


def _checksum(arrays: Mapping[str, NDArray[Any]], structure: str) -> str:
    value = zlib.crc32(structure.encode())
    for name in sorted(arrays):
        value = zlib.crc32(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data, value)
    return f"{value:08x}"


def save(path: Path, identity: str, content: Mapping[str, Any]) -> None:
    """Write `content` (names to plain data, see `encode`) for the run `identity`; the file is whole or the old one.

    Raises OSError when the folder cannot be written.
    """
    arrays: Arrays = {}
    structure = json.dumps(encode(content, arrays))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        header = {"format": FORMAT, "identity": identity, "structure": structure}
        save_file(arrays, partial, {**header, "checksum": _checksum(arrays, structure)})
        with partial.open("rb") as handle:
            os.fsync(handle.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(path: Path) -> None:
    """Remove what processes that died while they wrote `path` left beside it; nobody else may be writing it."""
    for partial in path.parent.glob(f"{path.name}.*.partial"):
        partial.unlink(missing_ok=True)


def load(path: Path, identity: str, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Read back what `save` wrote; `hints` gives the type of every name in it.

    Raises BadInput when the file is damaged, of another format, or belongs to another run.
    """
    remedy = f"Remove {path} to start this run from the beginning."
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise BadInput(f"checkpoint {path} is damaged: {error}\n{remedy}") from error
    if header.get("format") != FORMAT:
        raise BadInput(f"checkpoint {path} has format {header.get('format')}, this version reads {FORMAT}.\n{remedy}")
    if header.get("identity") != identity:
        raise BadInput(
            f"checkpoint {path} belongs to run {header.get('identity')}, "
            f"not to this configuration and its images ({identity}).\n{remedy}"
        )
    if header.get("checksum") != _checksum(arrays, header.get("structure", "")):
        raise BadInput(f"checkpoint {path} is damaged: its checksum does not match.\n{remedy}")
    try:
        structure = json.loads(header["structure"])
        return {name: decode(hint, structure[name], arrays) for name, hint in hints.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"checkpoint {path} does not hold the state of this method: {error!r}\n{remedy}") from error
