"""A federation small enough for tests: 160 phantoms of 32 pixels at four clients, and one Ray for the session.

Helpers are fixtures rather than a module, so that tests run under every import mode of pytest.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedsir import coordinator
from fedsir.clients.executor import Executor, InProcessExecutor, Outcome, WorkItem
from fedsir.clients.runtime import ClientRuntime, RuntimeSetup
from fedsir.clients.tasks import Broadcast
from fedsir.condition import Condition, build_condition
from fedsir.config.run import RunConfig
from fedsir.config.training import ExecutionConfig
from fedsir.data.dataset import Dataset
from fedsir.data.load import load_dataset
from fedsir.events import Event, RoundFinished, RoundRecord, RunFinished, RunResult, RunStarted, RunStopped
from fedsir.federation.federation import Federation, FederationFacts, Truth

# Shells let what runs in the background ignore Ctrl-C, and the commands that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# And what `nohup` starts ignores that its terminal is gone.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

TINY: dict[str, Any] = {
    "data": {
        "source": "phantom",
        "image_size": 32,
        "train_images": 160,
        "test_images": 60,
        "images_per_patient": 2,
    },
    "federation": {"clients": 4, "clean_clients": 2, "noise": {"type": "symmetric", "ratio": 0.6}},
    "model": {"backbone": "tiny", "weights": "phantom-pretext"},
    "training": {"rounds": 3, "batch_size": 16},
    "evaluation": {"bootstrap_samples": 20},
}
# Relabels before the second and the third of three rounds.
OCT_FEDSIR: dict[str, Any] = {"name": "oct_fedsir", "stage_one": {"epochs": 1}, "relabeling": {"every": 1}}
CLIENTS = 4

Placement = int | Literal["per-client"]


@dataclass
class Collector:
    """A recorder that keeps every event."""

    events: list[Event] = field(default_factory=list)

    def record(self, event: Event) -> None:
        self.events.append(event)

    @property
    def started(self) -> RunStarted:
        return next(e for e in self.events if isinstance(e, RunStarted))

    @property
    def rounds(self) -> list[RoundRecord]:
        return [e.record for e in self.events if isinstance(e, RoundFinished)]

    @property
    def finished(self) -> RunResult | None:
        return next((e.result for e in self.events if isinstance(e, RunFinished)), None)

    @property
    def stopped(self) -> RunStopped | None:
        return next((e for e in self.events if isinstance(e, RunStopped)), None)


@dataclass
class Interrupter(Collector):
    """A recorder during whose work on round `at` the user interrupts the run."""

    at: int = 1
    error: BaseException = field(default_factory=KeyboardInterrupt)

    def record(self, event: Event) -> None:
        super().record(event)
        if isinstance(event, RoundFinished) and event.record.round == self.at:
            raise self.error


@dataclass(frozen=True)
class Dispatch:
    """Items of one round that went to the clients together, what was sent to all of them and what came back."""

    round: int
    items: tuple[WorkItem, ...]
    broadcast: dict[str, Any]
    outcomes: tuple[Outcome, ...]

    @property
    def updates(self) -> dict[int, Any]:
        return {i.client: o.result.update for i, o in zip(self.items, self.outcomes, strict=True)}


@dataclass
class Dispatching:
    """An executor that hands every dispatch to another one, changed by `change`, and keeps what went through."""

    inner: Executor
    change: Callable[[list[WorkItem]], list[WorkItem]] = lambda items: items
    before: Callable[[list[WorkItem]], None] = lambda _: None
    dispatched: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    log: list[Dispatch] = field(default_factory=list)

    @property
    def slots(self) -> int:
        return self.inner.slots

    def prepare(self, setup: RuntimeSetup) -> None:
        self.inner.prepare(setup)

    def run(self, items: Sequence[WorkItem], broadcast: Broadcast) -> list[Outcome]:
        self.before(list(items))
        self.dispatched.append((items[0].round, tuple(type(i.task).__name__ for i in items)))
        changed = self.change(list(items))
        outcomes = self.inner.run(changed, broadcast)
        self.log.append(Dispatch(items[0].round, tuple(changed), dict(broadcast), tuple(outcomes)))
        return outcomes

    def tasks(self, kind: str) -> list[Dispatch]:
        """The dispatches whose items have tasks of one kind."""
        return [d for d in self.log if type(d.items[0].task).__name__ == kind]

    def close(self) -> None:
        self.inner.close()


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in changes.items():
        known = out.get(key)
        # Other images and another method bring all of their own settings.
        nested = isinstance(known, dict) and isinstance(value, dict) and key != "method"
        out[key] = _merged(known, value) if nested and isinstance(known, dict) else value
    return out


class Lab:
    """Tiny runs through the coordinator, in this process unless told otherwise."""

    clients = CLIENTS
    oct_fedsir = OCT_FEDSIR
    collector = Collector
    interrupter = Interrupter
    dispatching = Dispatching

    def __init__(self) -> None:
        self._datasets: dict[str, Dataset] = {}
        self.executor = InProcessExecutor()

    def config(self, method: Any = "fedavg", **changes: Any) -> RunConfig:
        """The tiny run with `method`; `changes` are merged section by section."""
        settings = OCT_FEDSIR if method == "oct_fedsir" else method
        return RunConfig.model_validate(_merged(TINY, {**changes, "method": settings}))

    def oct(self, **changes: Any) -> dict[str, Any]:
        """Settings of OCT-FedSIR on tiny runs, merged with `changes`."""
        return _merged(OCT_FEDSIR, changes)

    def dataset(self, config: RunConfig) -> Dataset:
        key = config.data.model_dump_json()
        if key not in self._datasets:
            self._datasets[key] = load_dataset(config.data)
        return self._datasets[key]

    def condition(self, config: RunConfig) -> Condition:
        return build_condition(config, self.dataset(config))

    def federation_of(
        self, config: RunConfig, indices: Sequence[Any], observed: Sequence[Any] | None = None, noisy: Any = None
    ) -> Condition:
        """The condition of `config` with the images dealt by hand; observed labels default to the true ones."""
        condition = self.condition(config)
        labels = condition.dataset.train.labels
        true = tuple(labels[np.asarray(i)].astype(np.int64) for i in indices)
        seen = true if observed is None else tuple(np.asarray(y, dtype=np.int64) for y in observed)
        federation = Federation(condition.federation.class_names, tuple(np.asarray(i, np.int64) for i in indices), seen)
        status = np.zeros(len(indices), dtype=np.bool_) if noisy is None else np.asarray(noisy, dtype=np.bool_)
        return replace(condition, federation=federation, truth=Truth(true, status), facts=FederationFacts(0, ()))

    def run(
        self,
        config: RunConfig,
        *,
        executor: Executor | None = None,
        condition: Condition | None = None,
        recorder: Any = None,
        checkpoint: Path | None = None,
    ) -> RunResult:
        return coordinator.run(
            config,
            condition or self.condition(config),
            executor or self.executor,
            [] if recorder is None else [recorder],
            checkpoint,
            "cpu",
        )

    def setup(self, config: RunConfig, condition: Condition | None = None) -> RuntimeSetup:
        """What the coordinator would tell the workers of a run."""
        condition = condition or self.condition(config)
        return RuntimeSetup(
            model=config.model,
            num_classes=condition.dataset.num_classes,
            transform=config.data.transform,
            train_images=condition.dataset.train.images,
            test_images=condition.dataset.test.images,
            indices=condition.federation.indices,
            public_pool=condition.federation.public_pool,
            seed=config.seed,
            threads=config.execution.threads,
            device="cpu",
            precision=config.execution.precision,
        )

    def runtime(self, config: RunConfig, condition: Condition | None = None) -> ClientRuntime:
        return ClientRuntime(self.setup(config, condition))

    @staticmethod
    def essence(result: RunResult) -> dict[str, Any]:
        """Everything about a result that must not depend on where or in how many pieces the run went."""
        verdict = result.identification
        return {
            "weights": result.weights_hash,
            "labels": None if result.labels is None else [y.tolist() for y in result.labels],
            "clean": None if verdict is None else verdict.clean.tolist(),
            "similarity": None if verdict is None else verdict.similarity.tobytes(),
            "p_clean": None if verdict is None else verdict.p_clean.tobytes(),
            "confusion": result.confusion.tolist(),
            "accuracy": {k: v for k, v in result.final.items() if k.startswith("final/")},
        }


@pytest.fixture(scope="session")
def lab() -> Lab:
    torch.set_num_threads(1)
    return Lab()


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A local Ray that counts enough CPUs for several small pools to stay up side by side."""
    import ray

    from fedsir.clients.local_ray import start_ray

    if ray.is_initialized():
        ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        # Ray would otherwise start an idle worker for every CPU that it counts.
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        # Not by `partial`: `start_ray` gives its own numbers where the machine limits the process.
        start, counted = ray.init, {"num_cpus": 16, "object_store_memory": 200 * 2**20}
        patch.setattr(ray, "init", lambda *address, **settings: start(*address, **{**settings, **counted}))
        start_ray(ExecutionConfig())
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def pool_of(local_ray: None) -> Iterator[Callable[[Placement], Any]]:  # noqa: ARG001 - needs a running Ray
    """Pools of warm actors for the tiny federation, one per placement, started when first asked for."""
    from fedsir.clients.pool import ActorPool

    pools: dict[Placement, ActorPool] = {}

    def pool(actors: Placement) -> ActorPool:
        if actors not in pools:
            pools[actors] = ActorPool(ExecutionConfig(actors=actors), CLIENTS)
        return pools[actors]

    yield pool
    for started in pools.values():
        started.close()


@pytest.fixture(scope="session")
def lane_of(pool_of: Callable[[Placement], Any]) -> Callable[[Placement], Any]:
    """An executor on the pool of a placement."""
    return cache(lambda actors: pool_of(actors).lane())
