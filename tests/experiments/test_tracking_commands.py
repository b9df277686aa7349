"""`fedsir tracking` and `fedsir ui` as commands."""

from __future__ import annotations

import re
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.store import prepare_store


@pytest.fixture
def recorded(store: str) -> str:
    """A store with one run that is nothing but a name."""
    book = prepare_store(TrackingConfig(uri=store, experiment="carried"))
    if not book.runs():
        run = book.client.create_run(book.experiment_id, run_name="alone", tags={"fedsir.run_id": "a1"})
        book.client.set_terminated(run.info.run_id, "FINISHED")
    return store


def test_runs_are_carried_in_a_file(fedsir: Any, recorded: str, tmp_path: Path) -> None:
    out = fedsir.call("tracking", "export", "runs.zip", "--experiment", "carried", "--tracking-uri", recorded)
    assert (out.code, out.err) == (0, "")
    assert out.out.startswith("1 run of ")
    again = fedsir.call("tracking", "export", "runs.zip", "--experiment", "carried", "--tracking-uri", recorded)
    assert again.code == 2
    assert "exists already" in again.err
    # Into the store that it came from: nothing to do.
    came = fedsir.call("tracking", "import", "runs.zip", "--tracking-uri", recorded)
    assert (came.code, came.err) == (0, "")
    assert "0 runs added, 0 replaced since they have gone on, 1 there already" in came.out
    (tmp_path / "other.zip").write_text("something else")
    assert fedsir.call("tracking", "import", "other.zip", "--tracking-uri", recorded).code == 2


def test_nothing_recorded_is_nothing_to_show(fedsir: Any, tmp_path: Path) -> None:
    for words in (["ui"], ["tracking", "export", "runs.zip"]):
        ended = fedsir.call(*words)
        assert ended.code == 2
        assert "no such file" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_server_needs_no_other(fedsir: Any) -> None:
    for words in (["ui", "--tracking-uri"], ["tracking", "serve", "--backend-store-uri"]):
        ended = fedsir.call(*words, "http://localhost:5000")
        assert ended.code == 2
        assert "open that address" in ended.err
    folder = fedsir.call("ui", "--tracking-uri", "mlruns")
    assert folder.code == 2
    assert "SQLite file instead" in folder.err


@pytest.mark.slow
def test_the_dashboard_is_shown_until_it_is_stopped(fedsir: Any, recorded: str, tmp_path: Path) -> None:
    process: subprocess.Popen[str] = fedsir.start(tmp_path, "ui", "--tracking-uri", recorded, "--port", "5097")
    try:
        text = fedsir.read_until(process, "runs of carried")
        address = re.findall(r"http://127.0.0.1:5097", text)
        assert address
        with urllib.request.urlopen(address[0]) as answer:
            assert b"MLflow" in answer.read()
    finally:
        process.send_signal(signal.SIGINT)
        ended = fedsir.wait(process)
    assert ended.code == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address[0])
