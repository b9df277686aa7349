"""Random streams: addressed by purpose and place, never by what was drawn before."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsir.seeding import Stream, generator, integer, sequence

seeds = st.integers(0, 2**70)
addresses = st.lists(st.integers(0, 2_000_000), max_size=3).map(tuple)


@given(seed=seeds, stream=st.sampled_from(Stream), address=addresses)
def test_the_same_address_gives_the_same_numbers(seed: int, stream: Stream, address: tuple[int, ...]) -> None:
    one, two = generator(seed, stream, *address), generator(seed, stream, *address)
    assert one.random(4).tolist() == two.random(4).tolist()
    assert integer(seed, stream, *address) == integer(seed, stream, *address)


@given(seed=seeds, stream=st.sampled_from(Stream), one=addresses, two=addresses)
def test_other_addresses_give_other_numbers(
    seed: int, stream: Stream, one: tuple[int, ...], two: tuple[int, ...]
) -> None:
    same = generator(seed, stream, *one).random(4).tolist() == generator(seed, stream, *two).random(4).tolist()
    assert same == (one == two)


def test_purposes_seeds_clients_and_rounds_do_not_meet() -> None:
    places = [
        (seed, stream, client, round_)
        for seed in (0, 1)
        for stream in Stream
        for client in range(3)
        for round_ in (0, 1, 1_000_000)
    ]
    drawn = [tuple(generator(*place).random(2).tolist()) for place in places]
    assert len(set(drawn)) == len(places)
    assert len({integer(*place) for place in places}) == len(places)


def test_purposes_have_numbers_of_their_own() -> None:
    assert all(a.value != b.value for a, b in combinations(Stream, 2))


@given(seed=seeds, address=addresses)
def test_integers_fit_every_library(seed: int, address: tuple[int, ...]) -> None:
    assert 0 <= integer(seed, Stream.DROPOUT, *address) < 2**63


def test_the_streams_of_earlier_results_stay_what_they_were() -> None:
    """Every recorded result depends on these; a change here changes all of them."""
    numbers = {
        "PARTITION": 1,
        "CLEAN_CLIENTS": 2,
        "NOISE": 3,
        "INITIAL_WEIGHTS": 4,
        "BATCHES": 5,
        "IDENTIFICATION": 6,
        "SPLIT": 7,
        "PHANTOM": 8,
        "PRETEXT": 9,
        "BOOTSTRAP": 10,
        "DROPOUT": 11,
    }
    assert {s.name: s.value for s in Stream}.items() >= numbers.items()
    reference = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy=7, spawn_key=(5, 3, 2))))
    assert generator(7, Stream.BATCHES, 3, 2).random(5).tolist() == reference.random(5).tolist()
    state = sequence(7, Stream.BATCHES, 3, 2).generate_state(1, np.uint64)[0]
    assert integer(7, Stream.BATCHES, 3, 2) == int(state) // 2


@pytest.mark.parametrize("seed", [-1, 1.5])
def test_a_seed_is_a_natural_number(seed: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        generator(seed, Stream.NOISE).random()  # type: ignore[arg-type]
