"""Ray actors that die, hang in start-up or fail: what a run loses by it, and how many of them are started."""

from __future__ import annotations

import os
import platform
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from fedsir.clients.actors import Actors
from fedsir.clients.executor import WorkItem
from fedsir.clients.feeding import MAX_ATTEMPTS, Feeder
from fedsir.clients.local_ray import start_ray
from fedsir.clients.placement import Placement
from fedsir.clients.pool import ActorPool
from fedsir.clients.runtime import Client
from fedsir.clients.sizing import Node, pool_size
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput, RunFailed, WorkersLost

# Actors cannot import test modules, so what is defined here travels with its code.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Striking:
    """Does its actor some harm before the work, as long as fewer than `times` marks are in `folder`."""

    inner: Any
    folder: str
    times: int

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[Any]:
        marks = Path(self.folder)
        if len(list(marks.iterdir())) < self.times:
            (marks / f"{os.getpid()}").touch()
            self.strike()
        return self.inner(client, broadcast)  # type: ignore[no-any-return]

    def strike(self) -> None:
        raise NotImplementedError


class Dying(Striking):
    """Kills its actor."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hanging(Striking):
    """Stops its actor."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Hungry(Striking):
    """Leaves its actor next to no memory for the work."""

    def strike(self) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        torch.ones(1 << 28)


@dataclass(frozen=True)
class Slow:
    """Takes its time before the work, so that items finish in another order than they were given."""

    inner: Any
    seconds: float

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[Any]:
        time.sleep(self.seconds)
        return self.inner(client, broadcast)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Failing:
    """Raises instead of working."""

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[Any]:  # noqa: ARG002
        raise ArithmeticError("the images of this client are cursed")


@dataclass(frozen=True)
class Who:
    """Reports the process that runs it and the client it runs for."""

    seconds: float = 0.0

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[Any]:  # noqa: ARG002
        time.sleep(self.seconds)
        return ClientResult((os.getpid(), client.id))


@dataclass(frozen=True)
class Settings:
    """Reports the threads its actor's libraries were told of, and bytes of a large block that stay when it is freed."""

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[Any]:  # noqa: ARG002
        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

        block = torch.ones(24 << 20, dtype=torch.uint8)
        before = resident()
        del block
        return ClientResult((os.environ["OMP_NUM_THREADS"], resident() - before + (24 << 20)))


@dataclass(frozen=True)
class When:
    """Reports when it ran."""

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[Any]:  # noqa: ARG002
        return ClientResult(time.perf_counter())


def wrapping(client: int, round_: int, wrap: Callable[[Any], Any]) -> Callable[[list[WorkItem]], list[WorkItem]]:
    """Wraps the task of one client in one round."""

    def change(items: list[WorkItem]) -> list[WorkItem]:
        training = type(items[0].task).__name__ == "LocalTraining"
        return [
            replace(i, task=wrap(i.task)) if training and (i.client, i.round) == (client, round_) else i for i in items
        ]

    return change


@pytest.fixture(scope="module")
def expected(lab: Any) -> str:
    """Weights of the undisturbed run."""
    return str(lab.run(lab.config()).weights_hash)


@pytest.mark.parametrize("reported_as", ["died", "out of memory"])
def test_an_actor_killed_under_a_task_costs_nothing(
    lab: Any,
    pool_of: Callable[..., ActorPool],
    tmp_path: Path,
    expected: str,
    reported_as: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether clients share actors or not, and whether the system or Ray's memory monitor killed it."""
    pool = pool_of("per-client" if reported_as == "died" else 2)
    lane = pool.lane()
    if reported_as == "out of memory":
        collect = Feeder.collect

        def collect_as_killed_by_ray(feeder: Feeder, future: Future[Any]) -> None:
            if isinstance(future.exception(), ray.exceptions.RayActorError):
                future._exception = ray.exceptions.OutOfMemoryError("the node is running low on memory")
            collect(feeder, future)

        monkeypatch.setattr(Feeder, "collect", collect_as_killed_by_ray)
    dying = wrapping(2, 1, lambda task: Dying(task, str(tmp_path), times=1))
    before = set(pool.pids())
    recorder = lab.collector()
    result = lab.run(lab.config(), executor=lab.dispatching(lane, change=dying), recorder=recorder)
    assert len(list(tmp_path.iterdir())) == 1
    assert len(before & set(pool.pids())) == len(before) - 1
    assert result.weights_hash == expected
    assert [r.round for r in recorder.rounds] == [1, 2, 3]


def test_an_actor_killed_from_outside_between_rounds_costs_nothing(
    lab: Any, pool_of: Callable[..., ActorPool], expected: str
) -> None:
    pool = pool_of(2)
    lane = pool.lane()

    class Killer(lab.collector):  # type: ignore[misc, name-defined]
        def record(self, event: Any) -> None:
            super().record(event)
            if len(self.rounds) == 1 and self.finished is None:
                os.kill(pool.pids()[0], signal.SIGKILL)

    recorder = Killer()
    before = pool.pids()
    assert lab.run(lab.config(), executor=lane, recorder=recorder).weights_hash == expected
    assert len(set(before) & set(pool.pids())) == 1


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("actors", [2, "per-client"])
def test_slots_of_a_lost_node_are_served_by_the_actors_that_are_left(
    lab: Any, expected: str, monkeypatch: pytest.MonkeyPatch, actors: Any
) -> None:
    """There is one node here, so what is said about the place of slot 1 is made up; its actor really dies."""
    pool = ActorPool(ExecutionConfig(actors=actors), lab.clients)
    try:
        slots, pids = pool.slots, pool.pids()
        monkeypatch.setattr(Placement, "holds", lambda _, slot: slot != 1)
        monkeypatch.setattr(Placement, "move", lambda _, slot: slot != 1)

        class Killer(lab.collector):  # type: ignore[misc, name-defined]
            def record(self, event: Any) -> None:
                super().record(event)
                if len(self.rounds) in (1, 2) and self.finished is None:
                    # First the one whose place is gone, then another one: where there are two, the one that took over.
                    os.kill(pids[1] if len(self.rounds) == 1 else pids[-1 if slots > 2 else 0], signal.SIGKILL)

        recorder = Killer()
        assert lab.run(lab.config(), executor=pool.lane(), recorder=recorder).weights_hash == expected
        # Who had nothing left to do when it died is missed in the next run only.
        assert lab.run(lab.config(), executor=pool.lane()).weights_hash == expected
        assert pool.slots == slots - 1
        assert pids[1] not in pool.pids()
        # With the last place goes the last hope.
        monkeypatch.setattr(Placement, "holds", lambda *_: False)
        monkeypatch.setattr(Placement, "move", lambda *_: False)
        for pid in pool.pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkersLost, match="could not be replaced"):
            lab.run(lab.config(), executor=pool.lane())
    finally:
        pool.close()


def test_a_task_that_always_kills_its_actor_ends_the_run(
    lab: Any, pool_of: Callable[..., ActorPool], tmp_path: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 <= MAX_ATTEMPTS <= 5
    monkeypatch.setattr("fedsir.clients.feeding.MAX_ATTEMPTS", 2)
    pool = pool_of(1)
    lane = pool.lane()
    dying = wrapping(2, 1, lambda task: Dying(task, str(tmp_path), times=100))
    recorder = lab.collector()
    with pytest.raises(RunFailed, match=r"client 2, round 1: Dying lost its actor 2 times"):
        lab.run(lab.config(), executor=lab.dispatching(lane, change=dying), recorder=recorder)
    assert len(list(tmp_path.iterdir())) == 2
    assert [r.round for r in recorder.rounds] == [1]
    # The pool serves the next run all the same, although its actor is dead when that begins.
    assert lab.run(lab.config(), executor=lane).weights_hash == expected


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is read from /proc")
@pytest.mark.parametrize("times", [1, 100])
def test_an_actor_that_runs_out_of_memory_is_replaced(
    lab: Any,
    pool_of: Callable[..., ActorPool],
    tmp_path: Path,
    expected: str,
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A torch that can allocate nothing any more says so in an ordinary error; the actor must not go on."""
    monkeypatch.setattr("fedsir.clients.feeding.MAX_ATTEMPTS", 2)
    pool = pool_of(2)
    lane, before = pool.lane(), pool.pids()
    hungry = wrapping(2, 1, lambda task: Hungry(task, str(tmp_path), times))
    executor = lab.dispatching(lane, change=hungry)
    if times == 1:
        assert lab.run(lab.config(), executor=executor).weights_hash == expected
    else:
        with pytest.raises(RunFailed, match=r"client 2, round 1: Hungry lost .* no memory left(.|\n)*\nLower exec"):
            lab.run(lab.config(), executor=executor)
        assert lab.run(lab.config(), executor=lane).weights_hash == expected
    limited = {int(mark.name) for mark in tmp_path.iterdir()}
    assert len(limited) == min(times, 2)
    assert not limited & set(pool.pids())
    assert len(set(before) - set(pool.pids())) == 1 or times > 1


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("times", [1, 100])
def test_a_hung_client_is_done_again_and_in_the_end_given_up(
    lab: Any, tmp_path: Path, expected: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsir.clients.feeding.MAX_ATTEMPTS", 2)
    # Long beside what a client takes here. Replaced actors have not done anything yet and so get the time of a start.
    pool = ActorPool(ExecutionConfig(actors=2, task_timeout_s=3.0, startup_timeout_s=30.0), lab.clients)
    try:
        lane = pool.lane()
        hanging = wrapping(2, 1, lambda task: Hanging(task, str(tmp_path), times))
        executor = lab.dispatching(lane, change=hanging)
        if times == 1:
            assert lab.run(lab.config(), executor=executor).weights_hash == expected
        else:
            with pytest.raises(RunFailed, match=r"client 2, round 1: Hanging lost .*task_timeout_s = 3 .*\nRaise it"):
                lab.run(lab.config(), executor=executor)
        assert lab.run(lab.config(), executor=lane).weights_hash == expected
        stopped = [Path("/proc") / mark.name for mark in tmp_path.iterdir()]
        assert len(stopped) == min(times, 2)
        deadline = time.monotonic() + 30
        while any(process.exists() for process in stopped) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(process.exists() for process in stopped)
    finally:
        pool.close()


def test_a_task_that_fails_ends_the_run_and_leaves_the_pool_usable(
    lab: Any, pool_of: Callable[..., ActorPool], expected: str
) -> None:
    pool = pool_of(2)
    lane = pool.lane()
    failing = wrapping(1, 2, lambda _: Failing())
    recorder = lab.collector()
    pids = pool.pids()
    with pytest.raises(RunFailed, match=r"client 1, round 2: Failing failed: ArithmeticError: .*cursed"):
        lab.run(lab.config(), executor=lab.dispatching(lane, change=failing), recorder=recorder)
    assert [r.round for r in recorder.rounds] == [1, 2]
    assert recorder.stopped is not None
    assert not recorder.stopped.killed
    assert lab.run(lab.config(), executor=lane).weights_hash == expected
    assert pool.pids() == pids


def test_a_failing_task_in_this_process_says_the_same(lab: Any) -> None:
    failing = wrapping(1, 2, lambda _: Failing())
    with pytest.raises(RunFailed, match=r"client 1, round 2: Failing failed: ArithmeticError: .*cursed") as caught:
        lab.run(lab.config(), executor=lab.dispatching(lab.executor, change=failing))
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_slow_clients_change_nothing(lab: Any, pool_of: Callable[..., ActorPool], expected: str) -> None:
    """The first client finishes last."""
    slow = wrapping(0, 1, lambda task: Slow(task, 0.5))
    executor = lab.dispatching(pool_of(2).lane(), change=slow)
    assert lab.run(lab.config(), executor=executor).weights_hash == expected


def test_results_come_in_the_order_of_the_items(lab: Any, pool_of: Callable[..., ActorPool]) -> None:
    pool = pool_of(2)
    lane = pool.lane()
    lane.prepare(lab.setup(lab.config()))
    order = [3, 0, 2, 1, 0, 3]
    items = [WorkItem(k, 0, Who(0.05 * k), cost=7 * k % 4) for k in order]
    assert [o.result.update[1] for o in lane.run(items, {})] == order


def test_every_client_has_its_own_actor_where_asked_for(lab: Any, pool_of: Callable[..., ActorPool]) -> None:
    pool = pool_of("per-client")
    lane = pool.lane()
    assert pool.slots == lab.clients
    lane.prepare(lab.setup(lab.config()))
    items = [WorkItem(k, 0, Who(), 1) for k in (0, 1, 2, 3, 3, 2, 1, 0)]
    homes = [o.result.update for o in lane.run(items, {})]
    assert len({pid for pid, _ in homes}) == lab.clients
    assert all(len({pid for pid, client in homes if client == k}) == 1 for k in range(lab.clients))


def test_the_longest_work_starts_first(lab: Any, pool_of: Callable[..., ActorPool]) -> None:
    pool = pool_of(1)
    lane = pool.lane()
    lane.prepare(lab.setup(lab.config()))
    costs = (3, 1, 9, 5)
    outcomes = lane.run([WorkItem(k, 0, When(), cost) for k, cost in enumerate(costs)], {})
    begun = [o.result.update for o in outcomes]
    assert sorted(range(4), key=begun.__getitem__) == [2, 3, 0, 1]


def test_actors_that_cannot_start_are_reported_in_time(local_ray: None) -> None:  # noqa: ARG001
    config = ExecutionConfig(actors=1, threads=32, startup_timeout_s=0.5)
    pool_cpus = ray.cluster_resources()["CPU"]
    taken = ray.util.placement_group([{"CPU": ray.available_resources()["CPU"]}])
    ray.get(taken.ready())
    try:
        with pytest.raises(BadInput, match=r"1 actors \(16 CPU, 0 GPU each\) did not start within 0.5 s") as caught:
            ActorPool(config, clients=1)
        assert re.search(
            r"node 127.0.0.1 .*: \d+ of 16 CPU, 0 of 0 GPU free(.|\n)*startup_timeout_s", str(caught.value)
        )
    finally:
        ray.util.remove_placement_group(taken)
    assert pool_cpus == 16


@pytest.mark.parametrize("deaths", [1, 2])
def test_an_actor_that_dies_at_its_start_is_started_once_more(
    local_ray: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    deaths: int,
) -> None:
    start, started = Actors._start, []

    def dying(actors: Actors, slot: int) -> Any:
        started.append(start(actors, slot))
        if len(started) <= deaths:
            ray.kill(started[-1])
        return started[-1]

    monkeypatch.setattr(Actors, "_start", dying)
    if deaths == 1:
        actors = Actors(ExecutionConfig(actors=1), 4, None)
        assert len(actors.pids()) == 1
        actors.release()
    else:
        with pytest.raises(BadInput, match="client actors cannot start"):
            Actors(ExecutionConfig(actors=1), 4, None)
    assert len(started) == 2


@pytest.mark.usefixtures("local_ray")
def test_what_is_done_while_actors_start_ends_them_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started, done = Actors._start, [], []

    def starting(actors: Actors, slot: int) -> Any:
        started.append(start(actors, slot))
        return started[-1]

    def failing() -> None:
        raise BadInput("no store")

    monkeypatch.setattr(Actors, "_start", starting)
    actors = Actors(ExecutionConfig(actors=1), 4, None, meanwhile=lambda: done.append(len(started)))
    assert done == [1]
    assert len(actors.pids()) == 1
    actors.release()
    with pytest.raises(BadInput, match="no store"):
        Actors(ExecutionConfig(actors=1), 4, None, meanwhile=failing)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(started[-1].pid.remote(), timeout=30)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
@pytest.mark.usefixtures("local_ray")
def test_actors_have_the_threads_of_the_configuration_and_keep_memory(lab: Any) -> None:
    pool = ActorPool(ExecutionConfig(actors=1, threads=3), 4)
    try:
        lane = pool.lane()
        lane.prepare(lab.setup(lab.config()))
        ((threads, stayed),) = (outcome.result.update for outcome in lane.run([WorkItem(0, 0, Settings(), 1)], {}))
    finally:
        pool.close()
    assert threads == "3"
    assert stayed > 20 << 20


@pytest.mark.parametrize(("deaths", "starts"), [(1, 2), (1000, 4)])
def test_a_replacement_is_tried_again_while_others_have_the_memory(
    local_ray: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    deaths: int,
    starts: int,
) -> None:
    """The first gets no memory, the second does; or none does for as long as a start may take."""
    start, get, clock = Actors._start, ray.get, [0.0]
    actors = Actors(ExecutionConfig(actors=1, startup_timeout_s=70.0), 4, None)
    started: list[int] = []

    def starting(self: Actors, slot: int) -> Any:
        started.append(slot)
        return start(self, slot)

    def getting(reference: Any, **options: Any) -> Any:
        if len(started) <= deaths:
            raise ray.exceptions.OutOfMemoryError("the node is running low on memory")
        return get(reference, **options)

    monkeypatch.setattr(Actors, "_start", starting)
    monkeypatch.setattr("fedsir.clients.actors.ray.get", getting)
    monkeypatch.setattr("fedsir.clients.actors.monotonic", lambda: clock[0])

    def pause(_: float) -> bool:
        clock[0] += 25.0
        return False

    monkeypatch.setattr(actors.stopping, "wait", pause)
    died = ray.exceptions.OutOfMemoryError("the node is running low on memory")
    try:
        if deaths == 1:
            actors.put(0, actors.replacement(0, died))
            assert len(actors.pids()) == 1
        else:
            with pytest.raises(
                WorkersLost, match=r"could not be replaced: .*low on memory\n.*The same command continues"
            ):
                actors.replacement(0, died)
        assert started == [0] * starts
    finally:
        actors.release()


def test_an_address_without_ray_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("nobody there\nsecond line")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    # The other tests need theirs.
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for address in ("127.0.0.1:1", "auto"):
        with pytest.raises(BadInput, match=rf"execution\.ray_address: .* {address}(.|\n)*ray start --head") as caught:
            start_ray(ExecutionConfig(ray_address=address))
        assert "second line" not in str(caught.value)


# -- how many ----------------------------------------------------------------------------------------------------


def size(clients: int = 10, cpus: float = 8, gpus: float = 0, **settings: Any) -> tuple[int, float]:
    return pool_size(ExecutionConfig(**settings), clients, [Node("", "here", cpus, gpus)])


def test_without_gpus_one_actor_per_core_and_no_more_than_clients() -> None:
    assert size() == (8, 0.0)
    assert size(clients=5) == (5, 0.0)
    assert size(threads=3) == (2, 0.0)
    assert size(cpus=1, threads=4) == (1, 0.0)
    assert size(cpus=0.5) == (1, 0.0)


def test_a_number_of_actors_is_at_most_the_number_of_clients() -> None:
    assert size(actors=3) == (3, 0.0)
    assert size(actors=30) == (10, 0.0)
    assert size(clients=30, cpus=2, actors="per-client") == (30, 0.0)


def test_gpu_fractions_decide_how_many_fit() -> None:
    assert size(gpus=1, gpus_per_client=0.25) == (4, 0.25)
    assert size(gpus=2, gpus_per_client=0.4) == (4, 0.4)
    assert size(gpus=1, gpus_per_client=0.1, clients=30) == (10, 0.1)
    assert size(gpus=1, gpus_per_client=1 / 3) == (3, 1 / 3)
    assert size(gpus=4, gpus_per_client=2) == (2, 2.0)
    assert size(gpus=8, gpus_per_client=0.5, clients=3) == (3, 0.5)
    assert size(gpus=3, device="cuda") == (3, 1.0)
    assert size(gpus=1, device="cuda", gpus_per_client=0.5) == (2, 0.5)


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        ({"actors": "per-client", "gpus_per_client": 0.5}, 4),
        ({"actors": 3, "gpus_per_client": 0.5}, 1),
        ({"actors": 1, "gpus_per_client": 2}, 1),
        ({"gpus_per_client": 0.1}, 0),
        ({"device": "cuda"}, 0),
        # 2 GPUs in all, but an actor cannot have a piece of each.
        ({"actors": 5, "gpus_per_client": 0.4}, 2),
        ({"actors": 3, "gpus_per_client": 0.6}, 2),
    ],
)
def test_more_gpus_than_there_are_is_bad_input(settings: dict[str, Any], gpus: float) -> None:
    with pytest.raises(BadInput, match=r"GPU(.|\n)*(Lower|cpu)"):
        size(gpus=gpus, **settings)


def test_a_gpu_fraction_on_the_cpu_is_bad_input() -> None:
    with pytest.raises(BadInput, match=r"gpus_per_client is 0.5 but execution.device is cpu"):
        size(gpus=1, device="cpu", gpus_per_client=0.5)
    assert size(gpus=1, device="cpu", gpus_per_client=0.0) == (8, 0.0)


def test_more_than_one_gpu_must_be_a_whole_number() -> None:
    """Ray cannot give one and a half."""
    with pytest.raises(BadInput, match=r"gpus_per_client.* 1\.5"):
        size(gpus=8, gpus_per_client=1.5)
