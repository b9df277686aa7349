"""Numbers in the words of plans and progress: durations, sizes, counts."""

from __future__ import annotations


def many(number: int, word: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """An estimated duration in as much detail as it deserves: `40 s`, `21 min`, `3.4 h`, `5.2 days`."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.1f} days"


def size(number: float) -> str:
    """Bytes as `1.7 GB`, `12 MB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= scale:
            shown = number / scale
            return f"{shown:.1f} {unit}" if shown < 10 else f"{shown:,.0f} {unit}"
    return f"{number / 1e3:.0f} kB"
