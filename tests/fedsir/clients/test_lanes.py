"""Runs that go on at the same time on one pool of actors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray

from fedsir.clients.executor import WorkItem
from fedsir.clients.pool import ActorPool
from fedsir.clients.tasks import PredictTest
from fedsir.errors import RunFailed


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Results of works that run in threads side by side; errors are results too."""
    results: list[Any] = [None] * len(works)

    def run(number: int, work: Callable[[], Any]) -> None:
        try:
            results[number] = work()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(n, work)) for n, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Stuck:
    """A pool that takes jobs and never does them."""

    def __init__(self, pool: ActorPool, begun: threading.Event) -> None:
        self.pool, self.begun = pool, begun

    def submit(self, job: Any) -> None:  # noqa: ARG002
        self.begun.set()

    def require_ray(self) -> None: ...

    def leave(self, lane: int) -> None:
        self.pool.leave(lane)


def test_runs_at_the_same_time_have_the_bits_of_runs_alone(lab: Any, pool_of: Callable[..., ActorPool]) -> None:
    pool = pool_of(2)
    # Other methods, seeds and networks, so that anything left by one run on an actor would show in another.
    configs = [
        lab.config("oct_fedsir"),
        lab.config(seed=5),
        lab.config("oct_fedsir", seed=5, model={"dropout": 0.3}),
        lab.config(training={"optimizer": {"lr": 0.01}}),
    ]
    conditions = [lab.condition(config) for config in configs]
    expected = [lab.essence(lab.run(c, condition=d)) for c, d in zip(configs, conditions, strict=True)]
    found = at_once(
        *(
            lambda c=c, d=d: lab.essence(lab.run(c, condition=d, executor=pool.lane()))
            for c, d in zip(configs, conditions, strict=True)
        )
    )
    assert found == expected


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is put into Ray's object store."""
    values: list[Any] = []
    put = ray.put

    def watched(value: Any) -> Any:
        values.append(value)
        return put(value)

    monkeypatch.setattr(ray, "put", watched)
    return values


def test_images_are_shipped_once_for_lanes_that_share_them(
    lab: Any, pool_of: Callable[..., ActorPool], shipped: list[Any]
) -> None:
    pool, config = pool_of(2), lab.config()
    setup = lab.setup(config)
    lanes = [pool.lane() for _ in range(3)]
    for lane in lanes[:2]:
        lane.prepare(setup)
    for lane in lanes[:2]:
        lane.close()
    # When nobody has them any more, the next run may.
    lanes[2].prepare(setup)
    lanes[2].close()
    # Other tests' lanes may have the images already.
    assert sum(value is setup.train_images for value in shipped) <= 1
    assert sum(value is setup.test_images for value in shipped) <= 1
    bare = [value for value in shipped if type(value) is type(setup)]
    assert len(bare) == 3
    assert all(value.train_images.size == 0 and value.test_images.size == 0 for value in bare)


def test_a_lane_that_is_closed_calls_off_what_it_has_under_way(lab: Any, pool_of: Callable[..., ActorPool]) -> None:
    """As after an error in the thread of the run, while another thread waits for a dispatch."""
    pool, config = pool_of(2), lab.config()
    lane = pool.lane()
    lane.prepare(lab.setup(config))
    begun = threading.Event()
    lane._pool = Stuck(pool, begun)  # type: ignore[assignment]
    found: dict[str, BaseException] = {}

    def work() -> None:
        try:
            lane.run([WorkItem(0, 0, PredictTest(0, 1), 1)], {})
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    lane.close()
    thread.join(60)
    assert not thread.is_alive()
    assert "called off" in str(found["error"])


def test_an_aborted_pool_interrupts_every_run(lab: Any, local_ray: None) -> None:  # noqa: ARG001
    pool = ActorPool(lab.config().execution.model_copy(update={"actors": 1}), lab.clients)
    try:

        class Aborting(lab.collector):  # type: ignore[misc, name-defined]
            def record(self, event: Any) -> None:
                super().record(event)
                if len(self.rounds) == 1:
                    pool.abort()

        config, recorder = lab.config(training={"rounds": 50}), Aborting()
        with pytest.raises(KeyboardInterrupt):
            lab.run(config, executor=pool.lane(), recorder=recorder)
        assert recorder.stopped is not None
        assert recorder.stopped.killed
        with pytest.raises(KeyboardInterrupt):
            lab.run(config, executor=pool.lane())
    finally:
        pool.close()


def test_a_run_that_fails_leaves_the_others_alone(lab: Any, pool_of: Callable[..., ActorPool]) -> None:
    pool = pool_of(2)
    expected = lab.run(lab.config()).weights_hash

    def broken(items: list[Any]) -> list[Any]:  # noqa: ARG001
        raise RunFailed("broken on purpose")

    failing = lab.dispatching(pool.lane(), change=broken)
    error, found = at_once(
        lambda: lab.run(lab.config(), executor=failing),
        lambda: lab.run(lab.config(), executor=pool.lane()).weights_hash,
    )
    assert isinstance(error, RunFailed)
    assert found == expected


def test_a_broadcast_is_put_once_for_dispatches_that_share_its_values(
    lab: Any, pool_of: Callable[..., ActorPool], shipped: list[Any]
) -> None:
    pool, config = pool_of(1), lab.config()
    lane, condition = pool.lane(), lab.condition(config)
    lane.prepare(lab.setup(config))
    shipped.clear()

    def logits(**broadcast: Any) -> Any:
        (outcome,) = lane.run([WorkItem(0, 0, PredictTest(0, 8), 1)], broadcast)
        return outcome.result.update

    weights = condition.initial_weights
    once = logits(weights=weights)
    assert np.array_equal(logits(weights=weights), once)
    assert len(shipped) == 1
    # Equal is not enough, and other values beside it make it another broadcast.
    other = replace(weights, values=weights.values * 2)
    assert not np.array_equal(logits(weights=other), once)
    logits(weights=other, teacher=weights)
    assert np.array_equal(logits(weights=weights), once)
    assert len(shipped) == 4
    lane.close()
