"""Corrupt labels of noisy clients: class-conditional symmetric or asymmetric noise (eq. 2-3).

Both kinds are one mechanism. A transition table gives for every class the classes it may be mistaken for: all
others (symmetric), one or none (asymmetric), or its neighbours. Q numbers: fedsir/CHOICES.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsir.config.federation import NoiseConfig
from fedsir.errors import BadInput

# For every class the classes it may be mistaken for, each equally likely; empty: the class keeps its labels.
Transitions = tuple[tuple[int, ...], ...]

_NAMED_PAIRS: Mapping[str, Mapping[str, str]] = {
    # Q29: the paper's printed figures need all four Kermany classes to be sources, hence both directions.
    "kermany": {"CNV": "DME", "DME": "CNV", "DRUSEN": "NORMAL", "NORMAL": "DRUSEN"},
    "wake_forest": {"GA": "NGA"},
}


def transitions(config: NoiseConfig, class_names: Sequence[str]) -> Transitions:
    """The transition table of a noise configuration.

    Raises BadInput when a label map does not fit the classes of the data set.
    """
    num_classes = len(class_names)
    if config.type == "none":
        return ((),) * num_classes
    if config.type == "symmetric":
        return tuple(tuple(j for j in range(num_classes) if j != c) for c in range(num_classes))
    label_map = config.label_map
    if isinstance(label_map, str) and label_map not in _NAMED_PAIRS:
        return _ordinal(label_map, num_classes)
    if isinstance(label_map, str):
        return _by_name(_NAMED_PAIRS[label_map], class_names, f"federation.noise.label_map: {label_map}")
    if label_map is None:
        raise BadInput("federation.noise.label_map: asymmetric noise needs a label map.")
    return _by_name(label_map, class_names, "federation.noise.label_map")


def flip_count(images: int, ratio: float, rounding: Literal["floor", "round"]) -> int:
    """How many of `images` labels of a class change at noise ratio eta.

    In rational arithmetic on the ratio as written: in floating point floor(0.7 * 90) is 62. `round` rounds
    halves to even.
    """
    exact = images * Fraction(str(ratio))
    return round(exact) if rounding == "round" else exact.numerator // exact.denominator


def corrupt_labels(
    labels: NDArray[np.int64],
    table: Transitions,
    ratio: float,
    rounding: Literal["floor", "round"],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Observed labels (n,) int64 of one noisy client with true labels (n,).

    Of every class a share of `ratio` images, drawn without replacement, changes label. What is drawn does not
    depend on the ratio, so for one generator state the images corrupted at a lower ratio are corrupted in the
    same way at every higher one.
    """
    observed = labels.copy()
    for c, targets in enumerate(table):
        members = rng.permutation(np.flatnonzero(labels == c))
        if targets and len(members):
            mistaken_for = np.asarray(targets, dtype=np.int64)[rng.integers(len(targets), size=len(members))]
            flips = flip_count(len(members), ratio, rounding)
            observed[members[:flips]] = mistaken_for[:flips]
    return observed


def _ordinal(name: str, num_classes: int) -> Transitions:
    """Maps between neighbouring severity grades, by class order."""
    last = num_classes - 1
    if num_classes < 2 or (name == "uic_pair_swap" and num_classes % 2):
        needed = "an even number of" if name == "uic_pair_swap" else "at least two"
        raise BadInput(f"federation.noise.label_map: {name} needs {needed} classes, this data set has {num_classes}.")
    if name == "uic_up":
        return tuple((c + 1,) if c < last else (c - 1,) for c in range(num_classes))
    if name == "uic_pair_swap":
        return tuple((c ^ 1,) for c in range(num_classes))
    return tuple(tuple(j for j in (c - 1, c + 1) if 0 <= j <= last) for c in range(num_classes))


def _by_name(pairs: Mapping[str, str], class_names: Sequence[str], where: str) -> Transitions:
    table: list[tuple[int, ...]] = [()] * len(class_names)
    for source, target in pairs.items():
        s, t = _position(source, class_names, where), _position(target, class_names, where)
        if s == t:
            raise BadInput(f"{where}: class {class_names[s]} is mapped to itself, which is no label noise.")
        if table[s]:
            raise BadInput(f"{where}: class {class_names[s]} is a source twice; name one target per class.")
        table[s] = (t,)
    return tuple(table)


def _position(name: str, class_names: Sequence[str], where: str) -> int:
    """Index of a class, exact spelling first, then ignoring case."""
    if name in class_names:
        return list(class_names).index(name)
    similar = [i for i, known in enumerate(class_names) if known.casefold() == name.casefold()]
    if len(similar) != 1:
        raise BadInput(
            f"{where}: class {name!r} is not one of this data set's classes {', '.join(class_names)}.\n"
            f"Remedy: a label map for these classes, or {{class: class it is mistaken for}} with their names."
        )
    return similar[0]
