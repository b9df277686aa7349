"""Measurements in programs of their own: what they say, return and are refused with arrives here."""

from __future__ import annotations

import os

import pytest

from experiments.bench.programs import Say, in_a_program
from fedsir.errors import BadInput, RunFailed


def measured(say: Say) -> int:
    say("first")
    say("second")
    return os.getpid()


def refused(_: Say) -> int:
    raise BadInput("no such thing")


def failed(_: Say) -> int:
    raise RunFailed("client 3, round 2: no memory")


def killed(say: Say) -> int:
    say("begun")
    os._exit(7)


def test_result_and_texts_come_from_another_program() -> None:
    said: list[str] = []
    assert in_a_program(measured, said.append) != os.getpid()
    assert said == ["first", "second"]


def test_what_is_refused_there_is_refused_here() -> None:
    with pytest.raises(BadInput, match="no such thing"):
        in_a_program(refused, lambda _: None)


def test_what_fails_there_fails_here() -> None:
    with pytest.raises(RunFailed, match="client 3, round 2: no memory"):
        in_a_program(failed, lambda _: None)


def test_a_program_without_an_answer_is_named_by_its_exit_code() -> None:
    said: list[str] = []
    with pytest.raises(RunFailed, match="exit code 7"):
        in_a_program(killed, said.append)
    assert said == ["begun"]


def test_an_interruption_ends_the_program() -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_a_program(measured, interrupt)
