"""Which MLflow store the record goes to. Free of MLflow itself, whose import takes more than a second."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote_plus, urlsplit

from pydantic import Field, field_validator

from fedsir.config.base import NonNegativeFloat, Section

DEFAULT_URI = "sqlite:///fedsir-runs/mlflow.db"
DATABASE_SCHEMES = ("postgresql", "mysql", "mssql")
SERVER_SCHEMES = ("http", "https")

# As SQLAlchemy reads it; there a password may also have the characters that end the host elsewhere: `/`, `?` and `#`.
_DATABASE_PASSWORD = re.compile(r"^([\w+.-]+://[^:/@]*:)[^@]*@")
# `odbc_connect` is a whole address with its password in it.
_PASSWORD = re.compile(r"(://[^\s:/@]*:)[^\s@/]*@")
_SECRET = re.compile("password|passwd|pwd|passphrase|token|secret|key|credential|odbc_connect", re.IGNORECASE)


class TrackingConfig(Section):
    """An MLflow store, the experiment in it, and how much of a run is recorded; nothing here changes a result.

    `uri`: `sqlite:///FOLDER/FILE.db` (artifacts go to `FOLDER/artifacts`), the address of a tracking server
    (`http://HOST:5000`), or a database that MLflow reaches directly (`postgresql://...`).
    `figures`: draw the PNG files. The CSV and JSON files with the same data are written in any case.
    `weights`: keep the last weights as an artifact. Their hash is kept in any case.
    `flush_seconds`: a round is sent at once if the store has heard nothing of its run for this long, otherwise with
    later ones or the end of the run; 0 sends every round at once. What a crash leaves unsent is sent on resuming.
    `patience_s`: rounds never wait for a store that is out of reach; the start and the end of a run wait for so many
    seconds, 0 for none. Then the run counts as interrupted, and the same command delivers what its checkpoint keeps.
    """

    uri: str = Field(default=DEFAULT_URI, description="SQLite file or MLflow tracking server")
    experiment: str = Field(default="fedsir", min_length=1, description="MLflow experiment of the runs")
    figures: bool = Field(default=True, strict=True, description="draw the figures (PNG); their data is always written")
    weights: bool = Field(default=True, strict=True, description="store the last weights of a run")
    flush_seconds: NonNegativeFloat = Field(default=5.0, description="least time between sending rounds")
    patience_s: NonNegativeFloat = Field(default=300.0, description="longest wait for a store that is out of reach")

    @field_validator("uri")
    @classmethod
    def _can_hold_a_record(cls, uri: str) -> str:
        scheme = urlsplit(uri).scheme.partition("+")[0]
        # A one-letter scheme is a Windows drive.
        if scheme == "file" or len(scheme) < 2:
            folder = uri.removeprefix("file:").rstrip("/") or "fedsir-runs"
            raise ValueError(
                f"{shown_uri(uri)!r} is a folder, and MLflow no longer keeps records in plain folders; "
                f"use a SQLite file instead, for example sqlite:///{folder}/mlflow.db "
                "(`mlflow migrate-filestore` carries old records over)"
            )
        if scheme == "sqlite" and sqlite_path(uri) is None:
            raise ValueError(f"{uri!r} names no file, so the record would be lost; use {DEFAULT_URI}")
        if scheme not in ("sqlite", *DATABASE_SCHEMES, *SERVER_SCHEMES):
            raise ValueError(
                f"{shown_uri(uri)!r} has unknown kind {scheme!r}; use sqlite:///FILE.db, http(s)://HOST:PORT "
                f"or one of {', '.join(s + '://' for s in DATABASE_SCHEMES)}"
            )
        return uri


def sqlite_path(uri: str) -> Path | None:
    """File of a `sqlite:` URI as an absolute path; None for other kinds and for in-memory databases."""
    scheme, _, text = uri.partition(":///")
    if scheme.partition("+")[0] != "sqlite":
        return None
    # Three slashes begin a relative path, four an absolute one; SQLAlchemy reads it without %-codes.
    text = text.partition("?")[0]
    if text in ("", ":memory:"):
        return None
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{uri!r}: there is no home folder {text.partition('/')[0]} on this machine") from error


def shown_uri(uri: str) -> str:
    """`uri` for people: without its password and the values in its query whose names speak of secrets."""
    password = urlsplit(uri).password
    if password is not None:
        uri = uri.replace(f":{password}@", ":***@", 1)
    elif uri.startswith(DATABASE_SCHEMES):
        uri = _DATABASE_PASSWORD.sub(r"\1***@", uri)
    place, mark, query = uri.partition("?")
    return place + mark + "&".join(map(_without_secret, query.split("&")))


def without_passwords(text: str) -> str:
    """A message of others for people: without the passwords of the addresses in it."""
    return _PASSWORD.sub(r"\1***@", text)


def _without_secret(item: str) -> str:
    name, equals, _ = item.partition("=")
    return f"{name}=***" if equals and _SECRET.search(unquote_plus(name)) else item
