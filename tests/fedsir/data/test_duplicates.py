from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedsir.data.duplicates import Alike, find_duplicates


def test_find_duplicates_prefers_test_and_then_the_first() -> None:
    values = [1, 2, 1, 3, 2, 0, 0, 3]  # 0: could not be read
    hashes = np.repeat(np.array(values, dtype=np.uint8)[:, None], 32, axis=1)
    is_test = np.array([False, False, False, False, True, False, True, True])
    assert find_duplicates(hashes, is_test).tolist() == [-1, 4, 0, 7, -1, -1, -1, -1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1)), max_size=30))
def test_hashes_are_equal_exactly_where_full_pictures_are(pictures: list[tuple[int, int, int]]) -> None:
    """A picture: its resized pixels, the rest of its pixels, and how they are packed into a file."""
    shas = [repr(picture) for picture in pictures]
    alike = Alike(shas, lambda index: b"full" + bytes(pictures[index][:2]))
    hashes, new = [], []
    for index, (resized, _, _) in enumerate(pictures):
        found, is_new = alike.hash_of(index, b"resized" + bytes([resized]))
        hashes.append(found)
        new.append(is_new)
    full = [picture[:2] for picture in pictures]
    for i in range(len(pictures)):
        assert [hashes[i] == other for other in hashes] == [full[i] == other for other in full]
        assert new[i] == (full[i] not in full[:i])


def test_only_pictures_that_look_alike_are_compared_in_full() -> None:
    asked: list[int] = []
    alike = Alike(["a", "b", "b", "c", "d"], lambda index: bytes([asked.append(index) or index]))
    for index, resized in enumerate([b"x", b"y", b"y", b"z", b"x"]):
        alike.hash_of(index, resized)
    assert asked == [0, 4]
