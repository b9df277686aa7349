"""Checkpoints: safetensors files, written atomically, with the structure as JSON in their headers.

A run has two: the newest, and the one before it beside it (`.previous`), which serves if the newest turns out to be
damaged. Neither holds code, and nothing in them is unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import typing
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedsir import __version__
from fedsir.errors import BadInput, RunFailed, first_line
from fedsir.text import shortened

FORMAT = "2"
Arrays = dict[str, NDArray[Any]]


class Damaged(BadInput):
    """A checkpoint that is not as it was written."""


class NotWritten(RunFailed):
    """A checkpoint could not be written, for no fault of the run, which can be continued from the one before."""


@dataclass(frozen=True)
class Owner:
    """The run that a checkpoint belongs to.

    identity: changes with everything that determines the result. settings: nested plain values, from which the
    difference to another run is told.
    """

    identity: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Texts:
    """In the place of a tuple: its items as `text_of` gave them, so that what stays is not encoded with every file."""

    items: Sequence[str]


def text_of(value: Any) -> str:
    """JSON of plain data (see `encode`) without arrays. Raises TypeError for anything else."""
    arrays: Arrays = {}
    text = json.dumps(encode(value, arrays))
    if arrays:
        raise TypeError(f"{type(value).__name__} holds arrays, which have no text")
    return text


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
    if hint is float and type(node) is int:
        return float(node)
    if isinstance(node, (dict, list)) or (hint in (bool, int, float, str) and type(node) is not hint):
        raise TypeError(f"{hint} does not say what to make of {type(node).__name__}")
    return node


def _structure(content: Mapping[str, Any], arrays: Arrays) -> str:
    """JSON of `content`; arrays go to `arrays`."""
    texts = {
        name: f"[{', '.join(value.items)}]"
        if isinstance(value, Texts)
        else json.dumps(encode(value, arrays, f".{name}"))
        for name, value in content.items()
    }
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in texts.items()) + "}"


def _digest(arrays: Mapping[str, NDArray[Any]], header: Mapping[str, str]) -> str:
    """Of everything in a file. CRC-32: it is taken every round, and is to find damage rather than forgery."""
    shapes = [[name, str(arrays[name].dtype), list(arrays[name].shape)] for name in sorted(arrays)]
    value = zlib.crc32(json.dumps([sorted(header.items()), shapes]).encode())
    for name in sorted(arrays):
        value = zlib.crc32(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data, value)
    return f"{value:08x}"


def previous(path: Path) -> Path:
    """Where the checkpoint before the newest is kept."""
    return path.with_name(f"{path.name}.previous")


def save(path: Path, owner: Owner, content: Mapping[str, Any]) -> None:
    """Write `content` (names to plain data, see `encode`, or to `Texts`); the file at `path` is whole or the old one.

    The old one becomes the previous one. Raises NotWritten where the disk is full or the folder cannot be written;
    what is there then still serves.
    """
    arrays: Arrays = {}
    header = {
        "format": FORMAT,
        "version": __version__,
        "identity": owner.identity,
        "settings": json.dumps(owner.settings),
        "structure": _structure(content, arrays),
    }
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, partial, {**header, "digest": _digest(arrays, header)})
        with partial.open("rb") as handle:
            os.fsync(handle.fileno())
        # Between the two renames there is a previous one alone, which `resume` takes.
        with suppress(FileNotFoundError):
            path.replace(previous(path))
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise NotWritten(
            f"checkpoint {path} could not be written: {reason}\n"
            f"Make {path.parent} writable, or room in it. The same command continues after the last finished round."
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a run's checkpoints; the newest last, so that an interruption leaves nothing older to continue from.

    Raises NotWritten where the folder does not allow it.
    """
    with _removing(path):
        previous(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def remove_partial(path: Path) -> None:
    """Remove what processes that died while they wrote `path` left beside it; nobody else may be writing it.

    Raises NotWritten where the folder does not allow it.
    """
    with _removing(path):
        for partial in path.parent.glob(f"{path.name}.*.partial"):
            partial.unlink(missing_ok=True)


@contextmanager
def _removing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotWritten(
            f"checkpoint {path} could not be removed: {error.strerror or error}\n"
            f"Make {path.parent} writable. The same command goes on from there."
        ) from error


def resume(path: Path, owner: Owner, hints: Mapping[str, Any]) -> tuple[dict[str, Any], str | None] | None:
    """Content of the newest usable checkpoint, and what the user should know about it; None where there is none.

    A damaged newest one is left alone and the previous one is taken. Raises BadInput as `load` does.
    """
    before = previous(path)
    if not path.exists():
        if not before.exists():
            return None
        return load(before, owner, hints), f"checkpoint {path} is missing; continuing from the one before it"
    try:
        return load(path, owner, hints), None
    except Damaged as error:
        if not before.exists():
            raise
        try:
            content = load(before, owner, hints)
        except BadInput as another:
            raise Damaged(f"{error}\nThe one before it serves no better: {first_line(another)}") from error
        return content, f"{first_line(error)}; continuing from the one before it"


def load(path: Path, owner: Owner, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Read back what `save` wrote; `hints` gives the type of every name in it.

    Raises BadInput: Damaged, or of another format or version, of another run, or of another state.
    """
    remedy = f"Remove {path} to start this run from the beginning."
    before = previous(path)
    if before.exists():
        remedy = f"Remove {path} and {before.name} to start this run from the beginning."
    if not path.is_file():
        raise Damaged(f"checkpoint {path} is damaged: it is not a regular file\n{remedy}")
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        digest = header.pop("digest", None)
        whole = digest is None or digest == _digest(arrays, header)
    except Exception as error:  # safetensors and NumPy raise about anything for what is damaged
        raise Damaged(f"checkpoint {path} is damaged: {first_line(error)}\n{remedy}") from error
    if not whole:
        raise Damaged(f"checkpoint {path} is damaged: its digest does not match\n{remedy}")
    if header.get("format") != FORMAT:
        raise BadInput(f"checkpoint {path} has format {header.get('format')}, this version reads {FORMAT}.\n{remedy}")
    if digest is None:
        raise Damaged(f"checkpoint {path} is damaged: it has no digest\n{remedy}")
    if header.get("version") != __version__:
        raise BadInput(
            f"checkpoint {path} was written by fedsir {header.get('version')}, which may compute otherwise than this "
            f"version, {__version__}.\nFinish the run with that version. {remedy}"
        )
    try:
        settings = json.loads(header["settings"])
        structure = json.loads(header["structure"])
        identity = header["identity"]
        if identity != owner.identity:
            differences = "; ".join(_differences(settings, owner.settings)) or "nothing that it says"
            raise BadInput(
                f"checkpoint {path} belongs to run {identity}, not to this configuration and its images "
                f"({owner.identity}).\nDifferent: {shortened(differences, 600)}.\n{remedy}"
            )
        return {name: decode(hint, structure[name], arrays) for name, hint in hints.items()}
    except BadInput:
        raise
    except Exception as error:  # a state may check itself and refuse in its own way
        raise BadInput(f"checkpoint {path} does not hold the state of this method: {error!r}\n{remedy}") from error


def _differences(there: Any, here: Any, path: str = "") -> Iterator[str]:
    """`training.rounds 3 there, 5 here` for everything in which two nested values differ."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys([*here, *there]):
            yield from _differences(there.get(key), here.get(key), f"{path}.{key}" if path else str(key))
    elif there != here:
        yield f"{path} {shortened(json.dumps(there), 60)} there, {shortened(json.dumps(here), 60)} here"
