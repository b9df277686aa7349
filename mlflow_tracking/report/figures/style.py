"""How methods look, the same in every figure of a report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fedsir.methods.registry import BUILT_IN
from mlflow_tracking.report.paper import ALL_CLEAN, OURS

INK = "#1F2328"
REFERENCE = "#57606A"
# Paul Tol's muted scheme, which colour-blind readers can tell apart; markers repeat what colour says. Seven markers
# for nine colours, so that a pair comes again only after 63 methods.
_COLOURS = ("#332288", "#CC6677", "#117733", "#DDCC77", "#88CCEE", "#882255", "#44AA99", "#999933", "#AA4499")
_MARKERS = ("o", "s", "^", "v", "D", "P", "X")


@dataclass(frozen=True)
class MethodStyle:
    """Colour, marker and line of a method. width: in points; order: later ones are drawn above."""

    colour: str
    marker: str
    line: Literal["-", "--"] = "-"
    width: float = 1.3
    order: int = 3


def method_order(labels: Iterable[str]) -> list[str]:
    """Labels without repetition: as the methods are registered, each followed by its presets; all_clean at the end."""
    names = list(BUILT_IN)

    def key(label: str) -> tuple[bool, int, str]:
        name = label.partition("/")[0]
        return label == ALL_CLEAN, names.index(name) if name in names else len(names), label

    return sorted(set(labels), key=key)


def method_styles(labels: Iterable[str]) -> dict[str, MethodStyle]:
    """A style per label. OCT-FedSIR stands out by weight, the all-clean reference is dashed."""
    ordered = method_order(labels)
    others = [label for label in ordered if label not in (OURS, ALL_CLEAN)]
    styles = {
        label: MethodStyle(_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]) for i, label in enumerate(others)
    }
    styles[OURS] = MethodStyle(INK, "o", width=2.6, order=5)
    styles[ALL_CLEAN] = MethodStyle(REFERENCE, "", line="--", width=1.5, order=2)
    return {label: styles[label] for label in ordered}
