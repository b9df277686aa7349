"""A measurement in a program of its own: none gives all of its memory back, and what it did before stays in it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fedsir.errors import FedsirError, RunFailed

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True)
class _Answer:
    """What a measurement gave, or why it gave nothing."""

    result: Any = None
    error: FedsirError | None = None


def in_a_program(work: Callable[[Say], T], say: Say) -> T:
    """What `work` returns, a function that can be pickled, in a new interpreter; `say` gets what it says.

    Raises the FedsirError that `work` raises, RunFailed where the program has ended without an answer.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    program = context.Process(target=_serve, args=(work, there))
    program.start()
    there.close()
    try:
        while isinstance(message := here.recv(), str):
            say(message)
    except EOFError:
        program.join()
        raise RunFailed(f"a measurement ended with exit code {program.exitcode} and no result; see above") from None
    except BaseException:
        # As for this program: it ends its actors.
        program.terminate()
        raise
    finally:
        program.join()
    answer = cast("_Answer", message)
    if answer.error is not None:
        raise answer.error
    return cast("T", answer.result)


def _serve(work: Callable[[Say], Any], answers: Any) -> None:
    try:
        answer = _Answer(work(answers.send))
    except FedsirError as error:
        answer = _Answer(error=error)
    except (KeyboardInterrupt, SystemExit):
        return  # who ended it needs no traceback
    answers.send(answer)
