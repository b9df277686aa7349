"""When an actor loads what it needs, and how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from fedsir.clients.client_actor import ClientActor

STARTS = """
import gc, json, os, sys
from fedsir.clients.client_actor import ClientActor
large = ("numpy", "torch", "lightning")
before = [name for name in large if name in sys.modules]
actor = ClientActor(1)
import torch
print(json.dumps({
    "before": before, "after": [name for name in large if name in sys.modules], "pid": actor.pid() == os.getpid(),
    "threads": torch.get_num_threads(), "variable": os.environ["OMP_NUM_THREADS"],
    "looks for garbage": gc.isenabled(), "leaves alone": gc.get_freeze_count(),
}))
"""


def started() -> dict[str, Any]:
    """What a process of its own says of an actor."""
    ended = subprocess.run(
        [sys.executable, "-c", STARTS],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_the_class_is_small_and_its_start_loads_the_rest() -> None:
    found = started()
    assert found["before"] == []
    assert found["after"] == ["numpy", "torch", "lightning"]
    assert found["pid"]
    # Read when torch loads, so it must have been set before; by itself torch takes all cores.
    assert (found["threads"], found["variable"]) == (1, "1")
    assert found["looks for garbage"]
    assert found["leaves alone"] > 100_000


def test_a_share_of_the_gpu_is_all_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", told.append)
    monkeypatch.setattr("fedsir.clients.client_actor.keep_memory", lambda: None)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ClientActor(1, 0.25)
    ClientActor(1, None)
    assert told == [0.25]


PROGRAM = """
import sys
import experiments.session, fedsir.clients.pool
large = ("lightning", "torchmetrics", "scipy", "sklearn", "matplotlib", "mlflow")
print([name for name in large if name in sys.modules])
"""


def test_the_program_does_without_what_only_actors_need() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
