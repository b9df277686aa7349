"""A disk that is full when a checkpoint is written: the run is interrupted, and goes on from the one before."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from fedsir import checkpoint

FULL = os.strerror(errno.ENOSPC)


def full(error: Exception, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints cannot be written any more after so many of them; half of one is on the disk then."""
    write, written = checkpoint.save_file, []

    def limited(arrays: Any, path: Path, header: Any) -> None:
        write(arrays, path, header)
        written.append(path)
        if len(written) > after:
            path.write_bytes(path.read_bytes()[:100])
            raise error

    monkeypatch.setattr(checkpoint, "save_file", limited)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, FULL), SafetensorError(f"I/O error: {FULL} (os error 28)")], ids=["OS", "library"]
)
def test_a_run_that_cannot_keep_its_state_is_interrupted_and_continues(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    config, file, recorder, again = lab.config(), tmp_path / "run.safetensors", lab.collector(), lab.collector()
    with monkeypatch.context() as patch:
        # One before the first round, one after it.
        full(error, 2, patch)
        with pytest.raises(checkpoint.NotWritten) as caught:
            lab.run(config, recorder=recorder, checkpoint=file)
    said, remedy = str(caught.value).splitlines()
    assert said.startswith(f"checkpoint {file} could not be written: ")
    assert FULL in said
    assert str(tmp_path) in remedy
    assert "same command continues" in remedy
    assert caught.value.__cause__ is error
    # The round whose state could not be kept is not recorded.
    assert [record.round for record in recorder.rounds] == [1]
    assert recorder.stopped is not None
    assert recorder.stopped.killed
    assert {path.name for path in tmp_path.iterdir()} == {file.name, f"{file.name}.previous"}
    result = lab.run(config, recorder=again, checkpoint=file)
    assert [record.round for record in again.started.history] == [1]
    assert lab.essence(result) == lab.essence(lab.run(config))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_as_well(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(checkpoint.NotWritten, match=r"file/run\.safetensors could not be written: File exists"):
        checkpoint.save(tmp_path / "file" / "run.safetensors", checkpoint.Owner("a", {}), {})
