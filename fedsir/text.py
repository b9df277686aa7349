"""Text that users give and that is shown again: on terminals, in tables, in files."""

from __future__ import annotations

import re

# C0 and C1 control characters (escape sequences start with one), halves of surrogate pairs, which cannot be written
# as UTF-8, and the marks that reverse the direction of what follows.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def control_character(text: str) -> str | None:
    """The first character of `text` that is a command to whatever shows it, spelled out; None where there is none."""
    found = _CONTROL.search(text)
    return None if found is None else f"U+{ord(found[0]):04X}"


def shortened(text: str, most: int) -> str:
    """`text`, or where it has more than `most` characters its beginning and three dots, `most` in all (at least 3)."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
