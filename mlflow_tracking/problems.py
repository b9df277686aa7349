"""What can be wrong with a store, in words: reason and remedy instead of a traceback."""

from __future__ import annotations

import sqlite3

from mlflow_tracking.config import shown_uri, sqlite_path


class StoreProblemError(Exception):
    """Reason and remedy, before the URI is added."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


def explained(uri: str, error: Exception) -> StoreProblemError:
    """Reason and remedy for an error of SQLite, a database driver, MLflow or the network."""
    text = str(error).strip()
    first = text.splitlines()[0].partition(". Response body")[0] if text else type(error).__name__
    local = sqlite_path(uri) is not None
    if "not a database" in text or "malformed" in text:
        return StoreProblemError(
            f"the file is damaged or not an MLflow database ({first})",
            "move it away or restore a copy; a new one is created on the next start",
        )
    if "locked" in text:
        return StoreProblemError(first, "end the program that holds the file (a database browser, an old run)")
    if "out-of-date database schema" in text:
        return StoreProblemError(
            "it was written by an older MLflow", f"keep a copy, then run `mlflow db upgrade {shown_uri(uri)}`"
        )
    if "Can't locate revision" in text:
        return StoreProblemError("it was written by a newer MLflow", "upgrade MLflow here")
    if isinstance(error, ModuleNotFoundError):
        return StoreProblemError(f"the database driver {error.name!r} is missing", f"pip install {error.name}")
    if "error code 401" in text or "error code 403" in text:
        return StoreProblemError(
            "the server refuses this user",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    if local and isinstance(error, OSError | sqlite3.OperationalError):
        return StoreProblemError(f"it cannot be written ({first})", "name a file in a folder of yours")
    return StoreProblemError(f"{type(error).__name__}: {first[:300]}", "check the address and that MLflow runs there")


def refusal(uri: str, problem: StoreProblemError) -> str:
    """The few lines that a user reads."""
    return (
        f"The MLflow store cannot be used.\n"
        f"  uri:    {shown_uri(uri)}\n"
        f"  reason: {problem.reason}\n"
        f"  remedy: {problem.remedy} (setting tracking.uri)"
    )
