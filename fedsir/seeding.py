"""Independent random streams, each named by what it is for.

A stream is addressed by (run seed, purpose, further integers such as client and round), never by how many
numbers were drawn before, so no change to one part of a run can shift the randomness of another.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """Purposes; the numbers are part of every result, so they are never reused or reordered."""

    PARTITION = 1
    CLEAN_CLIENTS = 2
    NOISE = 3
    INITIAL_WEIGHTS = 4
    BATCHES = 5
    IDENTIFICATION = 6
    SPLIT = 7
    PHANTOM = 8
    PRETEXT = 9
    BOOTSTRAP = 10
    DROPOUT = 11
    PUBLIC_POOL = 12
    METHOD = 13
    AUDIT = 14
    PARTICIPATION = 15


def sequence(seed: int, stream: Stream, *address: int) -> np.random.SeedSequence:
    """The seed sequence at `address` (for example client, round) of a stream."""
    return np.random.SeedSequence(entropy=seed, spawn_key=(int(stream), *address))


def generator(seed: int, stream: Stream, *address: int) -> np.random.Generator:
    """A NumPy generator at `address` of a stream."""
    return np.random.Generator(np.random.PCG64(sequence(seed, stream, *address)))


def integer(seed: int, stream: Stream, *address: int) -> int:
    """A 63-bit seed for libraries that take one integer (torch, scikit-learn after reduction mod 2^32)."""
    return int(sequence(seed, stream, *address).generate_state(1, np.uint64)[0] >> np.uint64(1))
