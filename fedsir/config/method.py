"""Base of the methods' settings; each method defines its own in its file."""

from __future__ import annotations

from fedsir.config.base import Section


class MethodConfig(Section):
    """Settings of a method; `name` selects it."""

    name: str
