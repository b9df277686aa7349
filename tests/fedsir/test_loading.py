"""Garbage is left alone while something is loaded, and only then."""

from __future__ import annotations

import gc

import pytest

from fedsir.loading import loading


def test_garbage_is_looked_for_again_afterwards() -> None:
    seen = []

    def failing() -> None:
        with loading():
            with loading():
                seen.append(gc.isenabled())
            seen.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        failing()
    assert seen == [False, False]
    assert gc.isenabled()


def test_the_last_of_several_threads_resumes_it() -> None:
    first, second = loading(), loading()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_whoever_does_not_look_for_it_is_left_alone() -> None:
    gc.disable()
    try:
        with loading():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
