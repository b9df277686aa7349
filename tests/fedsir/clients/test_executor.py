"""The executor in this process, and what every executor shares."""

from __future__ import annotations

import errno
import gc
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from fedsir.clients.executor import InProcessExecutor, WorkItem, longest_first, out_of_memory, perform
from fedsir.clients.objective import CrossEntropy
from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult, LocalTraining, PredictTest, nbytes
from fedsir.clients.training import Recipe
from fedsir.config.training import OptimizerConfig
from fedsir.errors import RunFailed
from fedsir.models.flat import FlatWeights


@dataclass(frozen=True)
class TorchNumbers:
    """Numbers from torch's own generator, such as dropout would draw."""

    count: int = 3

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[list[float]]:  # noqa: ARG002
        return ClientResult(torch.rand(self.count).tolist())


def test_longest_first_keeps_the_order_of_equals() -> None:
    items = [WorkItem(k, 0, TorchNumbers(), cost) for k, cost in enumerate([5, 9, 5, 9, 1])]
    assert longest_first(items) == [1, 3, 0, 2, 4]


def test_work_before_preparation_is_refused() -> None:
    with pytest.raises(RuntimeError, match="prepare"):
        InProcessExecutor().run([WorkItem(0, 0, TorchNumbers(), 1)], {})


def test_torch_numbers_depend_on_client_and_round_alone(lab: Any) -> None:
    executor = InProcessExecutor()
    executor.prepare(lab.setup(lab.config()))

    def numbers(*places: tuple[int, int], count: int = 3) -> list[list[float]]:
        items = [WorkItem(k, t, TorchNumbers(count), 1) for k, t in places]
        return [o.result.update for o in executor.run(items, {})]

    first, second, later = numbers((0, 0), (1, 0), (0, 1))
    assert first != second
    assert first != later
    assert numbers((0, 1), (1, 0)) == [later, second]
    numbers((1, 0), count=100)
    assert numbers((0, 0)) == [first]


def test_the_callers_random_numbers_are_left_alone(lab: Any) -> None:
    executor = InProcessExecutor()
    executor.prepare(lab.setup(lab.config()))
    torch.manual_seed(0)
    expected = torch.rand(2).tolist()
    torch.manual_seed(0)
    executor.run([WorkItem(0, 0, TorchNumbers(), 1)], {})
    assert torch.rand(2).tolist() == expected


def test_dropout_is_reproducible_and_felt(lab: Any) -> None:
    config = lab.config(model={"dropout": 0.5})
    assert lab.run(config).weights_hash == lab.run(config).weights_hash
    assert lab.run(config).weights_hash != lab.run(lab.config()).weights_hash


def test_another_network_gets_another_module_and_another_run_the_same(lab: Any) -> None:
    config = lab.config()
    executor = InProcessExecutor()
    executor.prepare(lab.setup(config))
    module = executor.runtime().module
    executor.prepare(lab.setup(lab.config(seed=5)))
    assert executor.runtime().module is module
    assert executor.runtime().setup.seed == 5
    executor.prepare(lab.setup(lab.config(model={"dropout": 0.3})))
    assert executor.runtime().module is not module


def test_runs_in_between_leave_no_trace(lab: Any) -> None:
    """The module is reused by runs with other methods, rates and seeds; nothing of them may remain."""
    config = lab.config("oct_fedsir")
    fresh = lab.run(config, executor=InProcessExecutor())
    executor = InProcessExecutor()
    lab.run(lab.config(seed=9, training={"optimizer": {"lr": 0.1, "weight_decay": 0.5}}), executor=executor)
    assert lab.essence(lab.run(config, executor=executor)) == lab.essence(fresh)


def test_thirty_dispatches_leave_no_tensors_behind(lab: Any) -> None:
    config = lab.config()
    condition = lab.condition(config)
    executor = InProcessExecutor()
    executor.prepare(lab.setup(config, condition))
    recipe = Recipe(CrossEntropy(), 1, 16, OptimizerConfig(), teacher_logits=True)
    items = [WorkItem(k, 0, LocalTraining(y, recipe), 1) for k, y in enumerate(condition.federation.observed)]
    items.append(WorkItem(0, 0, PredictTest(0, 60), 1))

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    executor.run(items, {"weights": condition.initial_weights})
    before = live_tensors()
    for _ in range(30):
        executor.run(items, {"weights": condition.initial_weights})
    assert live_tensors() <= before


def test_seconds_are_split_into_data_and_compute(lab: Any) -> None:
    config = lab.config()
    condition = lab.condition(config)
    recipe = Recipe(CrossEntropy(), 1, 16, OptimizerConfig())
    item = WorkItem(0, 0, LocalTraining(condition.federation.observed[0], recipe), 1)
    seconds = perform(lab.runtime(config), item, {"weights": condition.initial_weights}).work
    assert seconds.data > 0
    assert seconds.compute > 0


def test_bytes_of_nested_results() -> None:
    weights = FlatWeights(np.zeros(10, np.float32), np.zeros(2, np.int64))
    assert nbytes({"weights": weights, "more": (np.zeros(3), [None, 1.5, "text"])}) == 40 + 16 + 24


@dataclass(frozen=True)
class TooLarge:
    """Asks for more memory than any machine has."""

    library: str

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[None]:  # noqa: ARG002
        (np if self.library == "numpy" else torch).ones(1 << 46)  # type: ignore[attr-defined]
        return ClientResult(None)


@pytest.mark.parametrize(("library", "kind"), [("numpy", ".*MemoryError"), ("torch", "RuntimeError")])
def test_where_memory_is_short_the_remedy_is_said(lab: Any, library: str, kind: str) -> None:
    executor = InProcessExecutor()
    executor.prepare(lab.setup(lab.config()))
    with pytest.raises(RunFailed, match=rf"client 2, round 5: TooLarge failed: {kind}: (.|\n)*\nLower execution\.act"):
        executor.run([WorkItem(2, 5, TooLarge(library), 1)], {})


def test_other_errors_are_not_taken_for_want_of_memory() -> None:
    assert not out_of_memory(RuntimeError("shapes do not fit"))
    assert not out_of_memory(ValueError("can't allocate memory"))
    assert out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    assert not out_of_memory(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
