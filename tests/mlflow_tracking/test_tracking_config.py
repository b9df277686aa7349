from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mlflow_tracking.config import TrackingConfig, shown_uri, sqlite_path


@pytest.mark.parametrize("uri", ["file:///tmp/mlruns", "file:mlruns", "mlruns", "./mlruns", "/tmp/mlruns", r"C:\runs"])
def test_folders_are_refused_with_a_remedy(uri: str) -> None:
    with pytest.raises(ValidationError, match=r"plain folders.*sqlite:///"):
        TrackingConfig(uri=uri)


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "ftp://host/x"])
def test_other_unusable_uris_are_refused(uri: str) -> None:
    with pytest.raises(ValidationError, match="use "):
        TrackingConfig(uri=uri)


@pytest.mark.parametrize("uri", ["http://host:5000", "https://host", "postgresql+psycopg2://u:p@host/db"])
def test_servers_and_databases_are_accepted(uri: str) -> None:
    assert TrackingConfig(uri=uri).uri == uri
    assert sqlite_path(uri) is None


def test_sqlite_path_is_absolute_and_literal() -> None:
    assert sqlite_path("sqlite:///a b/%20#1.db") == Path.cwd() / "a b" / "%20#1.db"
    assert sqlite_path("sqlite:////srv/x.db?timeout=3") == Path("/srv/x.db")
    assert sqlite_path("sqlite:///~/x.db") == Path.home() / "x.db"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://ann:s3cret@host/db", "postgresql://ann:***@host/db"),
        # SQLAlchemy takes these for parts of the password.
        ("postgresql://ann:s3/c?r#et@host/db", "postgresql://ann:***@host/db"),
        (
            "postgresql+psycopg://host/db?user=ann&password=s3cret&sslmode=require",
            "user=ann&password=***&sslmode=require",
        ),
        ("postgresql://host/db?Pass%77ord=s3cret", "?Pass%77ord=***"),
        ("https://host:5000/?token=s3cret#x", "https://host:5000/?token=***"),
        ("https://ann:s3cret@host?api_key=s3cret", "https://ann:***@host?api_key=***"),
        ("mssql+pyodbc://?odbc_connect=DRIVER%3Dx%3BPWD%3Ds3cret", "?odbc_connect=***"),
    ],
)
def test_passwords_are_not_shown(uri: str, shown: str) -> None:
    assert shown_uri(uri).endswith(shown)
    assert "s3" not in shown_uri(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "http://host:5000",
        "sqlite:////srv/x.db?timeout=3",
        "postgresql://ann@host:5432/db?keepalives=1&application_name=a@b",
    ],
)
def test_addresses_without_secrets_are_shown_as_they_are(uri: str) -> None:
    assert shown_uri(uri) == uri


def test_everything_is_recorded_unless_switched_off() -> None:
    config = TrackingConfig()
    assert (config.figures, config.weights, config.flush_seconds) == (True, True, 5.0)


@pytest.mark.parametrize(
    "values", [{"flush_seconds": -1.0}, {"flush_seconds": float("inf")}, {"figures": "no"}, {"weights": 0}]
)
def test_values_that_mean_something_else_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrackingConfig(**values)


def test_the_configuration_does_not_import_mlflow(start_python: Any) -> None:
    slow = {"mlflow", "matplotlib", "torch"}
    code = f"import sys, mlflow_tracking.config; sys.exit(bool({slow} & set(sys.modules)))"
    assert start_python(code).wait(timeout=60) == 0
