"""Which images have equal pixels, and which of them stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedsir.data.catalogue import Catalogue
from fedsir.data.messages import count


class Alike:
    """Hashes that are equal exactly where full pictures are, mostly from the hashes of resized ones.

    Hashing every full picture would take a tenth of the time of preparing it. Equal pictures are equal when
    resized as well, so only those whose resized pixels have been met before are compared in full.

    shas: sha256 of each file, filled in before `hash_of` asks for it; files of equal bytes hold equal pictures.
    full_hash: the hash of the full picture at an index, slow.
    """

    def __init__(self, shas: Sequence[str], full_hash: Callable[[int], bytes]) -> None:
        self._shas, self._full_hash = shas, full_hash
        self._first: dict[bytes, int] = {}
        self._full_of_first: dict[int, bytes] = {}
        self._others: set[bytes] = set()

    def hash_of(self, index: int, resized: bytes) -> tuple[bytes, bool]:
        """The hash of a picture and whether none before it was equal.

        resized: hash of its resized pixels and its full shape. Pictures have to come in the same order to get
        the same hashes.
        """
        first = self._first.setdefault(resized, index)
        if first == index or self._shas[first] == self._shas[index]:
            return resized, first == index
        if first not in self._full_of_first:
            self._full_of_first[first] = self._full_hash(first)
        full = self._full_hash(index)
        if full == self._full_of_first[first]:
            return resized, False
        is_new = full not in self._others
        self._others.add(full)
        return full, is_new


def find_duplicates(hashes: NDArray[np.uint8], is_test: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(N,) int64: the index of the equal image that is kept instead of this one, or -1.

    hashes: (N, 32) uint8, as `Alike` gives them; rows of zeros (files that could not be read) equal nothing. Test
    images come before train images, so of a pair across the splits the train copy goes.
    """
    first: dict[bytes, int] = {}
    duplicate_of = np.full(len(hashes), -1, dtype=np.int64)
    for index in storage_order(is_test):
        value = hashes[index].tobytes()
        if any(value):
            kept = first.setdefault(value, int(index))
            if kept != index:
                duplicate_of[index] = kept
    return duplicate_of


def describe_duplicates(catalogue: Catalogue, duplicate_of: NDArray[np.int64]) -> list[str]:
    """Notes on dropped duplicates: how many, where, and how many contradict the image that was kept."""
    dropped = np.flatnonzero(duplicate_of >= 0)
    if not len(dropped):
        return []
    kept = duplicate_of[dropped]
    of_train, kept_test = ~catalogue.is_test[dropped], catalogue.is_test[kept]
    note = (
        f"{count(len(dropped), 'image')} dropped because another image has the same pixels: "
        f"{int(np.sum(of_train & ~kept_test))} within train, {int(np.sum(~of_train))} within test, "
        f"{int(np.sum(of_train & kept_test))} from train that are also in test"
    )
    other_patient = int(np.sum(catalogue.patients[dropped] != catalogue.patients[kept]))
    other_label = int(np.sum(catalogue.labels[dropped] != catalogue.labels[kept]))
    return [f"{note}; {other_patient} under another patient, {other_label} with another label"]


def storage_order(is_test: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Test before train, each in the order of the source."""
    return np.argsort(~is_test, kind="stable").astype(np.int64)
