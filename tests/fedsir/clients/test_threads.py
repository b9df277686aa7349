"""The configured number of threads holds for every task, whatever else the process does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

from fedsir.clients.runtime import set_threads
from fedsir.spectral.decomposition import class_spectrum


@pytest.fixture(autouse=True)
def one_thread_for_the_others() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def test_threads_changed_between_rounds_change_no_bit(lab: Any) -> None:
    """As a recorder, a notebook cell or another library may do."""
    config = lab.config()
    expected = lab.run(config).weights_hash
    seen = []

    def meddle(_: Any) -> None:
        seen.append(torch.get_num_threads())
        torch.set_num_threads(3)

    assert lab.run(config, executor=lab.dispatching(lab.executor, before=meddle)).weights_hash == expected
    assert set(seen) == {1}


def test_the_linear_algebra_of_numpy_follows() -> None:
    """Gram matrices have other bits with other numbers of threads, so spectra would depend on who runs a client."""
    features = np.random.default_rng(0).random((700, 512))

    def spectrum() -> bytes:
        found = class_spectrum(features, kappa=10.0, max_residual=12)
        assert found is not None
        return found.leading.tobytes() + found.residual.tobytes()

    with threadpool_limits(limits=1, user_api="blas"):
        expected = spectrum()
    with threadpool_limits(limits=2, user_api="blas"):
        set_threads(1)
        assert spectrum() == expected


@pytest.mark.skipif("mkl_get_max_threads" not in torch.__config__.parallel_info(), reason="torch without MKL")
def test_both_thread_pools_are_set() -> None:
    """OpenMP's number alone says nothing about MKL's."""

    def mkl_threads() -> int:
        found = re.search(r"mkl_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())
        assert found is not None
        return int(found[1])

    torch.set_num_threads(2)
    with threadpool_limits(limits=1, user_api="openmp"):
        assert (torch.get_num_threads(), mkl_threads()) == (1, 2)
        set_threads(1)
        assert (torch.get_num_threads(), mkl_threads()) == (1, 1)
