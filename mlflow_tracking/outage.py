"""When a store is out of reach: which errors say so, and what those who use it know of it together."""

from __future__ import annotations

import errno
import math
import re
import socket
import sqlite3
from collections.abc import Iterator
from time import monotonic

from fedsir.errors import first_line
from mlflow_tracking.config import without_passwords

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
COST_FACTOR = 3
"""The pause after a failed try is at least so many times as long as the try, so that an outage costs a run a quarter
of its time at most."""

# Disks and network shares that are full, read-only or gone; a network or a machine that is. Permissions are among
# them, since that is how a folder says that it has become read-only.
_SYSTEM = frozenset(
    code
    for name in (
        *("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EIO", "EREMOTEIO", "ENODEV", "ENXIO", "ESTALE", "ENOLCK"),
        *("ENOTCONN", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET", "ETIMEDOUT"),
    )
    # Some systems lack some of them.
    if (code := vars(errno).get(name)) is not None
)
# Not among them: a damaged file, a missing table, a violated constraint.
_SQLITE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
    }
)
_ANSWERED = re.compile(r"failed with error code (\d{3})\b")


def is_outage(error: BaseException) -> bool:
    """Whether the store could not be reached, or could not write just now, so that the same call may work later.

    That is: a connection that is refused, broken or too slow, and a name that is not resolved; an answer 408, 429 or
    5xx of a server or what stands before it; a database server that is gone; a SQLite file that is locked, read-only,
    or on a disk that is full or fails; a folder for artifacts of which that is true.
    It is not: what the store refuses (a parameter, a user), does not know, or holds damaged.
    """
    chain = list(_chain(error))
    of_sqlite = [each for each in chain if isinstance(each, sqlite3.Error)]
    if of_sqlite:
        # MLflow calls all operational errors of SQLite temporary, also that a table is missing.
        return any(_sqlite_code(each) in _SQLITE for each in of_sqlite)
    return any(map(_says_so, chain))


def reason(error: BaseException) -> str:
    """What an error comes from, in a few words without addresses."""
    *_, cause = _chain(error)
    return cause.strerror if isinstance(cause, OSError) and cause.strerror else without_passwords(first_line(cause))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it comes from."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _sqlite_code(error: sqlite3.Error) -> int | None:
    try:
        # The lowest byte; the others tell more of the same.
        return error.sqlite_errorcode & 0xFF
    except AttributeError:  # an error of Python's module rather than of SQLite
        return None


def _says_so(error: BaseException) -> bool:
    import requests  # what MLflow reaches servers with
    from mlflow.exceptions import ERROR_CODE_TO_HTTP_STATUS, MlflowException, RestException

    if isinstance(error, requests.HTTPError):
        return error.response is not None and _temporary(error.response.status_code)
    if isinstance(error, requests.exceptions.SSLError):
        return False
    if isinstance(error, requests.ConnectionError | requests.Timeout | requests.exceptions.ChunkedEncodingError):
        return True
    if isinstance(error, requests.exceptions.RetryError):
        # So ends every answer with a status for which MLflow tries again: 408, 429, 500, 502, 503 and 504.
        return True
    if isinstance(error, RestException):
        # Without a code of MLflow's it would count as 500, also where the server knows no such address.
        return "error_code" in error.json and _temporary(ERROR_CODE_TO_HTTP_STATUS.get(error.error_code, 500))
    if isinstance(error, MlflowException):
        answered = _ANSWERED.search(str(error))
        return error.error_code == "TEMPORARILY_UNAVAILABLE" or (answered is not None and _temporary(int(answered[1])))
    if isinstance(error, OSError):
        return isinstance(error, ConnectionError | TimeoutError | socket.gaierror) or error.errno in _SYSTEM
    return False


def _temporary(status: int) -> bool:
    """Of an HTTP status; 501 means that the server will never do it."""
    return status in (408, 429) or (status >= 500 and status != 501)


class Reach:
    """Whether a store can be reached, as far as those who use it have seen; they hold its lock when they note it."""

    def __init__(self) -> None:
        self._lost_at: float | None = None
        self._pause = 0.0
        self._next_try = -math.inf

    @property
    def pause(self) -> float:
        """Seconds until it should be tried again; 0 where nothing speaks against it."""
        return max(0.0, self._next_try - monotonic())

    @property
    def lost_for(self) -> float:
        """Seconds since it went out of reach, 0 while it answers."""
        lost_at = self._lost_at  # read once: others may find it meanwhile
        return 0.0 if lost_at is None else monotonic() - lost_at

    def lost(self, seconds: float) -> bool:
        """Note a try of so many seconds that did not reach it; whether this is the first since it was in reach."""
        now = monotonic()
        first = self._lost_at is None
        if first:
            self._lost_at = now - seconds
        self._pause = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause))
        self._next_try = now + max(self._pause, COST_FACTOR * seconds)
        return first

    def found(self) -> float | None:
        """Note that it answers; for how many seconds it had been out of reach, None if it had not been."""
        if self._lost_at is None:
            return None
        seconds = monotonic() - self._lost_at
        self._lost_at, self._pause, self._next_try = None, 0.0, -math.inf
        return seconds
