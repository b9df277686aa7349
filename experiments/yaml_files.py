"""YAML as files of settings need it: plain values of reasonable size, and errors a person can act on."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from fedsir.errors import BadInput
from fedsir.text import control_character, shortened

MAX_FILE_BYTES = 1_000_000
MAX_DEPTH = 50
MAX_NUMBER = 100
"""Characters of a number, date or word such as `true`."""
MAX_SHOWN = 200


def read_text(path: Path, source: str, kind: str, known: Sequence[str]) -> str:
    """Text of a YAML file that the user called `source`; `known`: names of shipped files, each called a `kind`.

    Raises BadInput for anything that is not a readable text file of reasonable size.
    """
    remedy = f"Give a YAML file or a {kind}: {', '.join(known)}."
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f"{source} is {'a folder' if path.is_dir() else 'not a regular file'}.\n{remedy}")
        if not path.exists():
            near = difflib.get_close_matches(source, known, n=1)
            hint = f" Did you mean the {kind} {near[0]}?" if near else ""
            raise BadInput(f"no such configuration: {source}.{hint}\n{remedy}")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise BadInput(f"{path} has {size} bytes, a file of settings at most {MAX_FILE_BYTES}.\n{remedy}")
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start}).\n{remedy}") from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{shortened(source, MAX_SHOWN)!r} cannot be read: {reason}.\n{remedy}") from error


def _refusal(what: str, where: Any) -> yaml.MarkedYAMLError:
    """The error that `what` is wrong at an event or a node."""
    return yaml.constructor.ConstructorError(None, None, what, where.start_mark)


class _Loader(yaml.SafeLoader):
    """Plain YAML with unique keys and numbers such as 3e-4.

    Without what no file of settings needs: aliases, which expand exponentially, tags, which ask for other types,
    deep nesting, numbers beyond 64 bits and control characters.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _refusal("aliases are not allowed", event)
        if event.tag is not None:
            raise _refusal(f"tags ({event.tag.removeprefix('tag:yaml.org,2002:')}) are not allowed", event)
        if self._depth >= MAX_DEPTH:
            raise _refusal("nested too deeply", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        character = control_character(node.value.replace("\n", "").replace("\t", ""))
        if character is not None:
            raise _refusal(f"the control character {character} is not allowed", node)
        if not node.tag.endswith(":str") and len(node.value) > MAX_NUMBER:
            # Sexagesimal numbers, for one, take time that grows with the square of their length.
            raise _refusal("a number is too long", node)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise _refusal(str(error), node) from error
        if isinstance(value, int) and abs(value) >= 2**63:
            raise _refusal("a number exceeds 64 bits", node)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a key must be a word", key)
            if key.value in seen:
                raise _refusal(f"key {key.value!r} is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 3e-4 as a string; everybody means the number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, name: str) -> Any:
    """Values of a YAML text; `name` is what messages call it. Raises BadInput with line and column."""
    # Runs of a grid read the same few texts thousands of times; a caller may change what it gets.
    return copy.deepcopy(_parsed(text, name))


@lru_cache(maxsize=1024)
def _parsed(text: str, name: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise BadInput(f"{name} is not valid YAML{place}: {error.problem or error}.") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{name} is not valid YAML: {' '.join(str(error).split())}.") from error
