"""Which runs `fedsir compare` makes of one run file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from experiments.config import RunFile, load_run_file
from fedsir.errors import BadInput
from fedsir.methods.registry import find_preset, method_names

ALL_CLEAN = "all_clean"
"""Not a method: FedAvg on the same federation without noise, the upper reference."""

MAX_SEEDS = 1000


def parse_methods(text: str) -> list[str]:
    """Labels from `oct_fedsir,oct_fedsir/no_kd,fedavg`. Raises BadInput for unknown and repeated ones."""
    known = [*method_names(), ALL_CLEAN]
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    if not chosen:
        raise BadInput(f"--methods: name at least one of {', '.join(known)}.")
    for label in chosen:
        name, _, preset = label.partition("/")
        if name in known and preset:
            find_preset("fedavg" if name == ALL_CLEAN else name, preset)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise BadInput(f"--methods {text}: there is no method {name!r}.{hint}\nKnown: {', '.join(known)}.")
    if len(set(chosen)) < len(chosen):
        raise BadInput(f"--methods {text}: name each method once.")
    return chosen


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


def variant(source: str, overrides: Sequence[str], base: RunFile, method: str, seed: int) -> RunFile:
    """The run file of another method and seed on the same federation; settings stay with the method they are for.

    Settings that the file has for a method apply to it, and so do overrides for the method that file and
    overrides together name; every other method has its defaults.
    """
    others = [o for o in overrides if not re.match(r"\s*method\s*[.=]", o)]
    seeded = f"seed={seed}"
    if method == ALL_CLEAN:
        return load_run_file(source, [*others, seeded, "method.name=fedavg", "federation.noise.type=none"])
    if method in (base.method.name, base.method.label):
        return load_run_file(source, [*overrides, seeded])
    return load_run_file(source, [*others, seeded, f"method.name={method}"])
