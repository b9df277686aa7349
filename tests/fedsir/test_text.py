"""Text that is shown again."""

from __future__ import annotations

import pytest

from fedsir.text import shortened


@pytest.mark.parametrize(
    ("text", "shown"), [("", ""), ("1234567", "1234567"), ("12345678", "1234..."), ("ü" * 100, "üüüü...")]
)
def test_long_text_keeps_its_beginning(text: str, shown: str) -> None:
    assert shortened(text, 7) == shown
