"""Lists of offending files, lines and patients that stay readable however long they are."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 10


def listing(heading: str, items: Sequence[str], remedy: str) -> str:
    """Heading, the first ten items and how many follow, and what to do about it: one line each."""
    lines = [heading, *(f"  {item}" for item in items[:SHOWN])]
    if len(items) > SHOWN:
        lines.append(f"  ... and {len(items) - SHOWN} more ({len(items)} in all)")
    lines.append(remedy)
    return "\n".join(lines)


def inline(items: Sequence[str]) -> str:
    """The first ten items in one line, for notes."""
    text = ", ".join(items[:SHOWN])
    return f"{text}, ... ({len(items)} in all)" if len(items) > SHOWN else text


def count(n: int, noun: str) -> str:
    """`1 image`, `2 images`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
