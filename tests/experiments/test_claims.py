"""Claims on runs between threads, real processes and (by files as another machine would leave them) machines."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from experiments import claim_files, claims
from experiments.claim_files import RunHeld
from experiments.claims import ClaimGuard, RunTakenOver, claim, claim_run, claims_folder
from experiments.config import load_run_file
from fedsir.errors import BadInput, RunFailed
from fedsir.events import Event, RoundFinished, RoundRecord, RunStopped

ROUND = RoundFinished(RoundRecord(1, {}), 2)
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
# Holds a claim and says so, then follows the orders on its standard input.
OWNER = """
import sys
from pathlib import Path
from experiments.claims import claim
from fedsir.errors import RunFailed
with claim(Path(sys.argv[1]), "run", "demo") as held:
    print("held", flush=True)
    for order in sys.stdin:
        try:
            held.require()
            print("mine", flush=True)
        except RunFailed as error:
            print("lost", str(error).splitlines()[0], flush=True)
"""
# Works like a sweep: whatever is not done yet and not held, until everything is done.
SWEEP = """
import random, sys, time
from pathlib import Path
from experiments.claim_files import RunHeld
from experiments.claims import claim
folder = Path(sys.argv[1])
names = [f"run{i}" for i in range(20)]
random.Random(sys.argv[2]).shuffle(names)
(folder / f"ready{sys.argv[2]}").touch()
while len(list(folder.glob("ready*"))) < 2:
    time.sleep(0.001)
while names:
    for name in tuple(names):
        try:
            with claim(folder / "claims", name, name):
                if not (folder / f"{name}.done").exists():
                    (folder / f"{name}.busy").touch(exist_ok=False)
                    time.sleep(0.003)
                    (folder / f"{name}.busy").unlink()
                    (folder / f"{name}.done").touch(exist_ok=False)
                    print(name)
                names.remove(name)
        except RunHeld:
            pass
"""


def hold(folder: Path) -> Any:
    return claim(folder, "run", "demo, fedavg, seed 0")


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def age(file: Path, seconds: float) -> None:
    """Let the last sign of life be so long ago."""
    then = time.time() - seconds
    os.utime(file, (then, then))


def own_content(folder: Path) -> dict[str, Any]:
    """What a claim of this process looks like."""
    with claim(folder, "sample", "sample"):
        content: dict[str, Any] = json.loads((folder / "sample.claim").read_bytes())
    return content


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[..., Path]:
    """Writes a claim as a process of another machine would."""

    def write(name: str = "run.claim", seconds: float = 0.0, **changes: object) -> Path:
        content = {**own_content(tmp_path), "host": "node7", "machine": "node7 x", "pid": 4711, "token": "t"}
        file = tmp_path / name
        file.write_text(json.dumps({**content, **changes}))
        age(file, seconds)
        return file

    return write


@contextmanager
def owner(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A real process that holds the claim."""
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def pulses() -> int:
    """Number of threads that give signs of life."""
    return sum(thread.name == "fedsir-claims" for thread in threading.enumerate())


def test_a_claim_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "claims"
    with hold(folder):
        assert files(folder) == ["run.claim"]
    assert files(folder) == []
    with pytest.raises(KeyError), hold(folder):
        raise KeyError
    assert files(folder) == []


def test_a_second_claim_in_one_process_is_refused(tmp_path: Path) -> None:
    with hold(tmp_path), claim(tmp_path, "other", "other"):
        with ThreadPoolExecutor(1) as pool:
            refused = pool.submit(lambda: hold(tmp_path).__enter__()).exception()
        assert isinstance(refused, RunHeld)
        assert f"process {os.getpid()} on " in str(refused)
        assert files(tmp_path) == ["other.claim", "run.claim"]
    with hold(tmp_path):
        pass


def test_two_processes_do_every_run_once(tmp_path: Path) -> None:
    sweeps = [
        subprocess.Popen([sys.executable, "-c", SWEEP, str(tmp_path), name], stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    done = [sweep.communicate(timeout=60)[0].split() for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0]
    assert sorted(done[0] + done[1]) == sorted(f"run{i}" for i in range(20))
    assert files(tmp_path / "claims") == []


@linux
@pytest.mark.parametrize("waited_for", [True, False])
def test_a_killed_process_blocks_nobody(tmp_path: Path, waited_for: bool) -> None:
    with owner(tmp_path) as process:
        with pytest.raises(RunHeld, match=f"process {process.pid} on .* since 20.*, last sign of life 0 s ago"):
            hold(tmp_path).__enter__()
        process.send_signal(signal.SIGKILL)
        if waited_for:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with hold(tmp_path) as held:
            assert not held.lost
    assert files(tmp_path) == []


@linux
def test_another_process_with_the_same_id_is_not_the_owner(tmp_path: Path) -> None:
    content = own_content(tmp_path)
    file = tmp_path / "run.claim"
    file.write_text(json.dumps({**content, "started": content["started"] - 1}))
    with hold(tmp_path):
        pass
    # Where the system does not tell the start, the process counts as the owner.
    file.write_text(json.dumps({**content, "started": None}))
    with pytest.raises(RunHeld):
        hold(tmp_path).__enter__()


def test_a_live_claim_of_another_machine_is_respected(tmp_path: Path, foreign: Callable[..., Path]) -> None:
    file = foreign(seconds=100)
    content = file.read_bytes()
    with pytest.raises(RunHeld) as refused:
        hold(tmp_path).__enter__()
    text = str(refused.value)
    for part in ("another process", "demo, fedavg, seed 0", "process 4711 on node7", "life 100 s ago", "Wait for its"):
        assert part in text
    assert file.read_bytes() == content
    assert files(tmp_path) == ["run.claim"]


def test_a_silent_claim_of_another_machine_expires(tmp_path: Path, foreign: Callable[..., Path]) -> None:
    foreign(seconds=claim_files.EXPIRY_S + 5)
    with hold(tmp_path) as held:
        held.require()
    assert files(tmp_path) == []


def test_process_ids_of_another_machine_say_nothing(tmp_path: Path, foreign: Callable[..., Path]) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    foreign(pid=ended.pid, host=own_content(tmp_path)["host"])  # of the same name, such as another container
    with pytest.raises(RunHeld):
        hold(tmp_path).__enter__()


def test_clocks_of_machines_do_not_matter(
    tmp_path: Path, foreign: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign(seconds=60)
    real = time.time
    for skew in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda skew=skew: real() + skew)
        with pytest.raises(RunHeld, match="life 60 s ago"):
            hold(tmp_path).__enter__()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\x00\xff", b"[]", b'{"pid": 1}', b"null", b'{"pid": 99999999999999999999}', b"x" * 100_000],
)
def test_a_claim_that_cannot_be_read_expires_by_age(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "run.claim"
    file.write_bytes(content)
    with pytest.raises(RunHeld, match="a process that left no name"):
        hold(tmp_path).__enter__()
    age(file, claim_files.EXPIRY_S + 5)
    with hold(tmp_path):
        pass
    assert files(tmp_path) == []


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**70])
def test_no_process_has_such_an_id(tmp_path: Path, pid: int) -> None:
    (tmp_path / "run.claim").write_text(json.dumps({**own_content(tmp_path), "pid": pid}))
    with pytest.raises(RunHeld, match="a process that left no name"):
        hold(tmp_path).__enter__()


def test_of_many_threads_one_takes_over(tmp_path: Path, foreign: Callable[..., Path]) -> None:
    takers = 8
    for _ in range(15):
        foreign(seconds=1000)
        start, end = threading.Barrier(takers, timeout=20), threading.Barrier(takers, timeout=20)

        def take(start: threading.Barrier = start, end: threading.Barrier = end) -> bool:
            with ExitStack() as stack:
                start.wait()
                try:
                    held = stack.enter_context(hold(tmp_path))
                except RunHeld:
                    end.wait()
                    return False
                end.wait()  # the winner lets go when everybody has tried
                return not held.lost

        with ThreadPoolExecutor(takers) as pool:
            won = [future.result() for future in [pool.submit(take) for _ in range(takers)]]
        assert sum(won) == 1
        assert files(tmp_path) == []


def _take_over(folder: Path, rounds: int, start: Any, end: Any, wins: Any) -> None:
    for _ in range(rounds):
        start.wait()
        with ExitStack() as stack:
            try:
                held = stack.enter_context(hold(folder))
            except RunHeld:
                end.wait()
            else:
                end.wait()
                wins.put(not held.lost)
        start.wait()  # for the next stale claim


@linux
def test_of_many_processes_one_takes_over(tmp_path: Path, foreign: Callable[..., Path]) -> None:
    takers, rounds = 4, 25
    until(lambda: pulses() == 0)  # a thread does not survive a fork, what it has locked would
    fork = multiprocessing.get_context("fork")
    start, end, wins = fork.Barrier(takers + 1, timeout=20), fork.Barrier(takers, timeout=20), fork.Queue()
    processes = [fork.Process(target=_take_over, args=(tmp_path, rounds, start, end, wins)) for _ in range(takers)]
    for process in processes:
        process.start()
    for _ in range(rounds):
        foreign(seconds=1000)
        start.wait()
        assert wins.get(timeout=20)
        start.wait()
        assert files(tmp_path) == []
    for process in processes:
        process.join(30)
    assert wins.empty()
    assert [process.exitcode for process in processes] == [0] * takers


def test_a_claim_renewed_during_a_takeover_stays(
    tmp_path: Path, foreign: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged silent, but another taker was faster: what lies there now is not what was judged."""
    file = foreign(seconds=1000)
    original = claim_files.exclusively

    @contextmanager
    def late(path: Path, what: str) -> Iterator[None]:
        with original(path, what):
            os.utime(file)
            yield

    monkeypatch.setattr(claim_files, "exclusively", late)
    with pytest.raises(RunHeld):
        hold(tmp_path).__enter__()
    assert files(tmp_path) == ["run.claim"]


def test_a_claim_released_and_renewed_during_a_takeover_stays(
    tmp_path: Path, foreign: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign(seconds=1000)
    original = claim_files.expired
    looks = []

    def expired(path: Path, what: str) -> bool:
        looks.append(path)
        if len(looks) == 2:
            path.unlink()
            gone = original(path, what)
            foreign()
            return gone
        return original(path, what)

    monkeypatch.setattr(claim_files, "expired", expired)
    with pytest.raises(RunHeld):
        hold(tmp_path).__enter__()
    assert files(tmp_path) == ["run.claim"]


def test_a_takeover_that_died_halfway_expires_too(tmp_path: Path, foreign: Callable[..., Path]) -> None:
    foreign(seconds=1000)
    right = foreign("run.claim.takeover")
    with pytest.raises(RunHeld):
        hold(tmp_path).__enter__()
    age(right, 1000)
    with hold(tmp_path):
        pass
    assert files(tmp_path) == []


@linux
def test_a_suspended_process_learns_that_it_has_lost(tmp_path: Path) -> None:
    with owner(tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("check\n")
        process.stdin.flush()
        assert process.stdout.readline() == "mine\n"
        process.send_signal(signal.SIGSTOP)
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        age(tmp_path / "run.claim", 1000)
        with hold(tmp_path) as held:
            process.send_signal(signal.SIGCONT)
            out, _ = process.communicate("check\n", timeout=30)
            assert out.startswith("lost another process has taken over this run (demo) after ")
            # It ended in good order, which must not have taken our claim away.
            assert process.returncode == 0
            held.require()
    assert files(tmp_path) == []


def test_signs_of_life_of_all_claims_come_from_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT_S", 0.01)

    until(lambda: pulses() == 0)
    with hold(tmp_path), claim(tmp_path, "other", "other"):
        for file in tmp_path.iterdir():
            age(file, 100)
        until(lambda: all(time.time() - file.stat().st_mtime < 50 for file in tmp_path.iterdir()))
        assert pulses() == 1
    until(lambda: pulses() == 0)
    with hold(tmp_path):
        age(tmp_path / "run.claim", 100)
        until(lambda: time.time() - (tmp_path / "run.claim").stat().st_mtime < 50)


def test_short_claims_do_not_put_off_the_signs_of_life_of_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT_S", 0.1)
    file = tmp_path / "run.claim"

    def renewed() -> bool:
        with claim(tmp_path, "short", "short"):
            return time.time() - file.stat().st_mtime < 50

    with hold(tmp_path):
        age(file, 100)
        until(renewed)


def test_signs_of_life_end_with_the_last_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    until(lambda: pulses() == 0)
    monkeypatch.setattr(claims, "HEARTBEAT_S", 3600)
    with hold(tmp_path):
        with claim(tmp_path, "other", "other"):
            pass
        assert pulses() == 1
    until(lambda: pulses() == 0)


def test_a_claim_that_is_just_being_taken_over_is_left_to_the_taker(
    tmp_path: Path, foreign: Callable[..., Path]
) -> None:
    with hold(tmp_path):
        foreign("run.claim.takeover")
    assert files(tmp_path) == ["run.claim", "run.claim.takeover"]


def test_no_sign_of_life_for_a_claim_that_is_lost(tmp_path: Path) -> None:
    with hold(tmp_path) as held:
        file = tmp_path / "run.claim"
        file.write_text(file.read_text().replace(held._token, "taken"))
        age(file, 100)
        held.beat()
        assert held.lost
        assert time.time() - file.stat().st_mtime > 50
    assert files(tmp_path) == ["run.claim"]


def test_what_cannot_be_read_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system that fails for a moment must not end a run."""
    original = claim_files.read

    def fail(_: Path) -> None:
        raise OSError(5, "Input/output error")

    with hold(tmp_path) as held:
        monkeypatch.setattr(claim_files, "read", fail)
        held.require()
        held.beat()
        monkeypatch.setattr(claim_files, "read", original)
        held.require()


class Book:
    """Recorder that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)


def test_the_guard_lets_nothing_through_once_the_run_is_lost(tmp_path: Path) -> None:
    book, stopped = Book(), RunStopped(RunFailed("x"), killed=False)
    with hold(tmp_path) as held, claim(tmp_path, "other", "other") as other:
        guard = ClaimGuard([other, held], [book])
        guard.record(ROUND)
        guard.record(stopped)
        assert book.events == [ROUND, stopped]
        (tmp_path / "run.claim").unlink()
        with pytest.raises(RunTakenOver, match=r"another process has taken over this run \(demo, fedavg, seed 0\)"):
            guard.record(ROUND)
        guard.record(stopped)
        assert book.events == [ROUND, stopped]
        assert not other.lost
        with hold(tmp_path):
            assert held.lost
        assert issubclass(RunTakenOver, RunFailed)


def test_a_deleted_folder_does_no_harm_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    with hold(folder) as held:
        shutil.rmtree(folder)
        assert held.lost
    assert not folder.exists()


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    folder.write_text("")
    with pytest.raises(BadInput, match=f"{folder}: the claim .* cannot be written .*\n.*--set work_dir") as refused:
        hold(folder).__enter__()
    assert not isinstance(refused.value, RunHeld)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(BadInput, match="Permission denied"):
            hold(tmp_path).__enter__()
    finally:
        tmp_path.chmod(0o700)


def test_a_full_disk_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, _: bytes) -> int:
            raise OSError(28, "No space left on device")

    original = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = original(path, mode, *args, **kwargs)
        if mode != "xb":
            return file
        file.close()
        return Full()

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(BadInput, match="No space left on device"):
        hold(tmp_path).__enter__()
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        ("sqlite:///{tmp}/store/mlflow.db", "store/claims"),
        ("sqlite:///here/mlflow.db", "here/claims"),
        ("http://localhost:5000", "work/claims"),
        ("postgresql://user@host/db", "work/claims"),
    ],
)
def test_claims_lie_beside_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_run_file("demo", [f"tracking.uri={uri.format(tmp=tmp_path)}", "work_dir=work"])
    assert claims_folder(config).resolve() == (tmp_path / folder).resolve()
    assert files(tmp_path) == []


def test_a_link_to_a_store_leads_to_the_same_claims(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mlflow.db").touch()
    (tmp_path / "link.db").symlink_to(tmp_path / "store" / "mlflow.db")
    config = load_run_file("demo", [f"tracking.uri=sqlite:///{tmp_path}/link.db"])
    assert claims_folder(config) == (tmp_path / "store" / "claims").resolve()


def test_a_run_is_held_in_its_store_and_in_its_work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def config(store: str, work_dir: str, seed: int = 0) -> Any:
        return load_run_file(
            "demo", [f"tracking.uri=sqlite:///{store}/mlflow.db", f"work_dir={work_dir}", f"seed={seed}"]
        )

    with claim_run(config("a", "a")) as held:
        assert len(held) == 1
        with claim_run(config("b", "c")) as others:
            assert len(others) == 2
        # The same record, or the same checkpoint.
        for other in (config("a", "b"), config("b", "a")):
            with pytest.raises(RunHeld, match="demo, oct_fedsir, seed 0"):
                claim_run(other).__enter__()
        with claim_run(config("a", "a", seed=1)):
            pass
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
