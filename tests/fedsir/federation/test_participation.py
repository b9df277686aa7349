"""Who takes part in a round."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedsir.federation.participation import draw_participants, number_of_participants

seeds, rounds = st.integers(0, 2**40), st.integers(0, 10_000)
shares = st.floats(0.0, 1.0, exclude_min=True)
sizes = st.integers(1, 60)


@given(seeds, rounds, sizes, shares)
def test_the_share_is_drawn_and_somebody_always_takes_part(seed: int, round_: int, clients: int, share: float) -> None:
    found = draw_participants(seed, round_, range(clients), clients, share)
    assert len(found) == number_of_participants(clients, share)
    assert 1 <= len(found) <= clients
    assert abs(len(found) - share * clients) <= 0.5 or len(found) == 1
    assert found == sorted(set(found))
    assert set(found) <= set(range(clients))
    assert found == draw_participants(seed, round_, range(clients), clients, share)


@given(seeds, rounds, sizes)
def test_with_participation_one_it_is_everybody(seed: int, round_: int, clients: int) -> None:
    assert draw_participants(seed, round_, range(clients), clients, 1.0) == list(range(clients))


@given(seeds, rounds, sizes, shares, shares)
def test_who_takes_part_at_a_small_share_does_so_at_a_larger_one(
    seed: int, round_: int, clients: int, one: float, other: float
) -> None:
    few, many = (draw_participants(seed, round_, range(clients), clients, p) for p in sorted((one, other)))
    assert set(few) <= set(many)


@given(seeds, rounds, sizes, shares, st.data())
def test_of_some_clients_those_take_part_who_come_first_in_the_order_of_all(
    seed: int, round_: int, clients: int, share: float, data: st.DataObject
) -> None:
    among = data.draw(st.lists(st.integers(0, clients - 1), min_size=1, unique=True))
    found = draw_participants(seed, round_, among, clients, share)
    assert set(found) <= set(among)
    assert len(found) == number_of_participants(len(among), share)
    # Shares that draw one client more each tell the order of all.
    order: list[int] = []
    for number in range(1, clients + 1):
        of_all = draw_participants(seed, round_, range(clients), clients, number / clients)
        order += [k for k in of_all if k not in order]
    eligible = [k for k in order if k in among]
    assert found == sorted(eligible[: len(found)])


def test_rounds_and_seeds_draw_others_and_in_the_long_run_everybody_equally_often() -> None:
    clients, share, times = 10, 0.3, 2000
    drawn = [tuple(draw_participants(5, t, range(clients), clients, share)) for t in range(times)]
    assert len(set(drawn[:20])) > 10
    assert drawn[:20] != [tuple(draw_participants(6, t, range(clients), clients, share)) for t in range(20)]
    counts = Counter(k for found in drawn for k in found)
    often = np.array([counts[k] for k in range(clients)])
    # Five standard deviations of a binomial count.
    assert np.abs(often - share * times).max() < 5 * np.sqrt(times * share * (1 - share))
