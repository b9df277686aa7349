"""Choice of clean clients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsir.federation.clean_clients import CleanClients, covering_clean_clients, random_clean_clients

NAMES = ("A", "B", "C")


def cover(counts: list[list[int]], wanted: int, minimum: int | None = None, seed: int = 0) -> CleanClients:
    return covering_clean_clients(np.array(counts), wanted, minimum, NAMES, np.random.default_rng(seed))


def test_random_draws_as_many_as_asked() -> None:
    chosen = random_clean_clients(10, 3, np.random.default_rng(0))
    assert chosen.clean.sum() == 3
    assert chosen.notes == ()


def test_cover_takes_the_client_that_provides_most() -> None:
    chosen = cover([[50, 0, 0], [50, 50, 50], [0, 50, 0]], wanted=1, minimum=50)
    assert chosen.clean.tolist() == [False, True, False]
    assert chosen.notes == ()


def test_cover_grows_beyond_what_was_asked_and_says_so() -> None:
    chosen = cover([[50, 0, 0], [0, 50, 0], [0, 0, 50], [1, 1, 1]], wanted=1, minimum=50)
    assert chosen.clean.tolist() == [True, True, True, False]
    assert "3 clients are clean instead of the 1 asked for" in chosen.notes[0]


def test_cover_is_filled_up_at_random() -> None:
    counts = [[50, 50, 50], *([[1, 1, 1]] * 6)]
    chosen = [cover(counts, wanted=3, minimum=50, seed=s).clean for s in range(8)]
    assert all(c[0] and c.sum() == 3 for c in chosen)
    assert len({tuple(c.tolist()) for c in chosen}) > 1


def test_ties_are_broken_by_the_given_stream_alone() -> None:
    counts = [[50, 50, 50]] * 6
    picks = [int(np.flatnonzero(cover(counts, 1, 50, s).clean)[0]) for s in range(20)]
    assert picks == [int(np.flatnonzero(cover(counts, 1, 50, s).clean)[0]) for s in range(20)]
    assert len(set(picks)) > 2


def test_default_demand_is_five_percent_of_the_class_up_to_450_images() -> None:
    # 5 % of class A are 50 images: client 0 with 49 does not provide it.
    chosen = cover([[49, 500, 500], [951, 0, 0]], wanted=1)
    assert chosen.clean.tolist() == [True, True]
    # 5 % of 100 000 would be 5000: 450 suffice.
    assert cover([[450, 450, 450], [99_550, 99_550, 99_549]], wanted=1, seed=1).clean.sum() == 1


def test_largest_holder_serves_where_nobody_has_enough() -> None:
    chosen = cover([[50, 50, 3], [0, 0, 7]], wanted=1, minimum=50)
    assert chosen.clean.all()
    assert "no client has 50 images of class C; the largest holder (7 images)" in chosen.notes[0]


def test_class_without_images_is_noted_and_not_covered() -> None:
    chosen = cover([[50, 50, 0], [50, 0, 0]], wanted=1, minimum=50)
    assert chosen.clean.tolist() == [True, False]
    assert "class C has no training image" in chosen.notes[0]


@pytest.mark.parametrize("wanted", [0, 3])
def test_none_and_all(wanted: int) -> None:
    chosen = cover([[50, 0, 0], [0, 50, 0], [0, 0, 50]], wanted, 50)
    assert chosen.clean.sum() == wanted
    assert chosen.notes == ()


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.lists(st.integers(0, 100), min_size=3, max_size=3), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 1000),
)
def test_every_class_that_exists_has_a_clean_holder(counts: list[list[int]], wanted: int, seed: int) -> None:
    wanted = min(wanted, len(counts))
    chosen = cover(counts, wanted, None, seed)
    table = np.array(counts)
    assert chosen.clean.sum() >= wanted
    np.testing.assert_array_equal(table[chosen.clean].sum(axis=0) > 0, table.sum(axis=0) > 0)
