"""What an engine is made for, how GPUs are told to compute, and that none of it concerns CPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsir.clients.engine import Engine, engine_key
from fedsir.clients.executor import InProcessExecutor
from fedsir.clients.memory_probe import Demand, ProbeActor
from fedsir.clients.numerics import CUBLAS_WORKSPACE, set_gpu_numerics
from fedsir.clients.pool import ActorPool
from fedsir.config.training import ExecutionConfig


def numerics() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(CUBLAS_WORKSPACE[0], raising=False)
    before, filling = numerics(), torch.utils.deterministic.fill_uninitialized_memory
    yield
    os.environ.pop(CUBLAS_WORKSPACE[0], None)
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = before[1:3]
    torch.set_float32_matmul_precision(before[3])
    torch.utils.deterministic.fill_uninitialized_memory = filling


@pytest.mark.usefixtures("restored")
def test_gpus_are_deterministic_or_fast() -> None:
    set_gpu_numerics(True)
    assert numerics() == (True, False, False, "highest")
    assert os.environ[CUBLAS_WORKSPACE[0]] == CUBLAS_WORKSPACE[1]
    set_gpu_numerics(False)
    assert numerics() == (False, True, True, "high")


def test_an_engine_on_a_cpu_changes_nothing_of_the_process(lab: Any) -> None:
    before = numerics()
    Engine.of(lab.setup(lab.config()))
    assert numerics() == before


@pytest.mark.parametrize("change", [{"deterministic": False}, {"compile": True}, {"precision": "bf16-mixed"}])
def test_engines_are_not_shared_by_runs_that_compute_differently(lab: Any, change: dict[str, Any]) -> None:
    setup = lab.setup(lab.config())
    assert engine_key(replace(setup, **change)) != engine_key(setup)
    assert engine_key(replace(setup, seed=9)) == engine_key(setup)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_a_compiled_network_learns_the_same(lab: Any) -> None:
    """The same schema, and weights that differ by rounding only."""
    config = lab.config(training={"rounds": 1})
    plain = lab.run(config)

    class Compiling(InProcessExecutor):
        def prepare(self, setup: Any) -> None:
            super().prepare(replace(setup, compile=True))

    executor = Compiling()
    compiled = lab.run(config, executor=executor)
    assert compiled.schema == plain.schema
    assert executor.runtime().network.backbone._compiled_call_impl is not None
    torch.testing.assert_close(
        torch.from_numpy(compiled.weights.values), torch.from_numpy(plain.weights.values), rtol=1e-3, atol=1e-4
    )


def test_the_memory_probe_does_what_clients_do(lab: Any) -> None:
    """Its figures need a GPU; its work does not."""
    config = lab.config()
    demand = Demand.of(config, lab.dataset(config))
    assert demand.image_bytes == 160 * 32 * 32
    probe = ProbeActor()
    assert probe.act(demand, "cpu") == 2
    runtime = probe.runtime()
    assert runtime.setup.train_images.shape == (2 * 17, 32, 32)
    assert runtime.optimizer.state


def test_a_pool_without_gpus_needs_no_measurement(lab: Any, local_ray: None) -> None:  # noqa: ARG001
    pool = ActorPool(ExecutionConfig(actors=1, gpus_per_client="auto", memory_cap=0.5), lab.clients)
    try:
        assert (pool.device, pool.slots) == ("cpu", 1)
        assert lab.run(lab.config(), executor=pool.lane()).weights_hash == lab.run(lab.config()).weights_hash
    finally:
        pool.close()
