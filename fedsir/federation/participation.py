"""Which clients take part in a round where only a share of them does."""

from __future__ import annotations

from collections.abc import Sequence

from fedsir.seeding import Stream, generator


def number_of_participants(clients: int, participation: float) -> int:
    """How many of `clients` take part in a round: the share `participation`, rounded, but at least one."""
    return max(1, round(participation * clients))


def draw_participants(seed: int, round_: int, among: Sequence[int], clients: int, participation: float) -> list[int]:
    """Clients that take part in a round, rising: the share `participation` of those in `among`.

    Uniform without replacement. A round has one random order of all `clients`, and the first of `among` in it take
    part: so all methods of a condition and seed get the same participants, methods that leave clients out draw from the
    others, and neither images nor labels decide anything. With participation 1 it is `among`, and nothing is drawn.
    """
    if participation == 1.0:
        return sorted(among)
    order = generator(seed, Stream.PARTICIPATION, round_).permutation(clients).tolist()
    eligible = set(among)
    return sorted([k for k in order if k in eligible][: number_of_participants(len(eligible), participation)])
