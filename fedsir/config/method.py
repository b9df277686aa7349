"""Base of the methods' settings; each method defines its own in its file."""

from __future__ import annotations

from pydantic import Field

from fedsir.config.base import Section


class MethodConfig(Section):
    """Settings of a method; `name` selects it."""

    name: str
    preset: str | None = Field(default=None, description="named variant whose settings apply unless given here")

    @property
    def label(self) -> str:
        """What tables call the method: `name`, or `name/preset`."""
        return self.name if self.preset is None else f"{self.name}/{self.preset}"
