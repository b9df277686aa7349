"""However often a run is interrupted, and whatever happens to its newest checkpoint, it ends with the same bits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsir import checkpoint

ROUNDS = 3
# The round after which the run stops, and what becomes of the checkpoint of that round.
STOPS = st.lists(st.tuples(st.integers(1, ROUNDS), st.sampled_from(["kept", "cut", "lost"])), max_size=3)


@pytest.fixture(scope="module")
def expected(lab: Any) -> Any:
    return lab.essence(lab.run(lab.config("oct_fedsir")))


@settings(max_examples=6, deadline=None, derandomize=True)
@given(stops=STOPS)
def test_interruptions_change_no_bit(lab: Any, expected: Any, stops: list[tuple[int, str]]) -> None:
    config = lab.config("oct_fedsir")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.safetensors"
        done = 0
        for at, fate in stops:
            if at <= done:
                continue  # that round is behind the run and stops nothing
            with pytest.raises(KeyboardInterrupt):
                lab.run(config, recorder=lab.interrupter(at=at), checkpoint=file)
            done = at
            if fate == "cut":
                file.write_bytes(file.read_bytes()[:-50])
            elif fate == "lost":
                file.unlink()
            if fate != "kept":
                done -= 1
        recorder = lab.collector()
        assert lab.essence(lab.run(config, recorder=recorder, checkpoint=file)) == expected
        assert [r.round for r in recorder.started.history] == list(range(1, done + 1))
        assert not file.exists()
        assert not checkpoint.previous(file).exists()
