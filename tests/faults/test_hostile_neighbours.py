"""Other users of a machine reach the loopback address and the folder for temporary files, but not a Ray of ours."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import listening
import processes
import pytest
from ray._private.ray_constants import ENABLE_RAY_CLUSTERS_ENV_VAR

from fedsir.clients import local_ray
from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system has other kinds of users")

NAMES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home and a place for temporary files of the test's own, and no settings of tokens; gives the home."""
    for name in NAMES:
        # Twice, so that what the test leaves is removed afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "temporary"))
    return tmp_path / "home"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Settings of every start of Ray, none of which happens."""
    found: list[dict[str, Any]] = []
    used = {"is_initialized": lambda: False, "shutdown": lambda: None}
    fake = SimpleNamespace(init=lambda _, **settings: found.append(settings), **used)
    monkeypatch.setattr(local_ray, "ray", fake)
    return found


@pytest.mark.usefixtures("started")
def test_the_token_is_for_this_user_alone(environment: Path) -> None:
    file = environment / ".ray" / "auth_token"
    local_ray.start_ray(ExecutionConfig())
    token = file.read_text()
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert (mode(file), mode(file.parent)) == (0o600, 0o700)
    assert list(file.parent.iterdir()) == [file]
    # As Ray leaves it.
    file.chmod(0o644)
    local_ray.start_ray(ExecutionConfig())
    assert (mode(file), file.read_text()) == (0o600, token)
    assert not set(NAMES) & set(os.environ)


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    ("name", "value"),
    [("RAY_AUTH_TOKEN", "a" * 64), ("RAY_AUTH_TOKEN_PATH", "/somewhere"), ("RAY_AUTH_MODE", "disabled")],
)
def test_what_users_say_of_the_token_holds(
    environment: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    local_ray.start_ray(ExecutionConfig())
    assert not environment.exists()
    assert {known: os.environ[known] for known in NAMES if known in os.environ} == {name: value}


@pytest.mark.usefixtures("started")
def test_without_a_home_the_token_is_in_the_environment(environment: Path) -> None:
    environment.write_text("no folder")
    local_ray.start_ray(ExecutionConfig())
    assert re.fullmatch("[0-9a-f]{64}", os.environ["RAY_AUTH_TOKEN"])


def test_folders_of_ray_are_in_one_that_others_cannot_enter(started: list[dict[str, Any]], tmp_path: Path) -> None:
    private = tmp_path / "temporary" / f"ray-{os.getuid()}"
    for _ in range(2):
        local_ray.start_ray(ExecutionConfig())
        assert Path(started[-1]["_temp_dir"]).parent == private
        assert mode(private) == 0o700
        private.chmod(0o777)


@pytest.mark.parametrize("kind", ["link", "file", "foreign"])
def test_a_folder_of_somebody_else_is_refused(started: list[dict[str, Any]], tmp_path: Path, kind: str) -> None:
    private = tmp_path / "temporary" / f"ray-{os.getuid()}"
    private.parent.mkdir()
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        private.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        private.touch()
    elif os.getuid() != 0:
        pytest.skip("only root can make one")
    else:
        private.mkdir()
        os.chown(private, 12345, -1)
    with pytest.raises(BadInput, match=r"belongs to somebody else; set RAY_TMPDIR"):
        local_ray.start_ray(ExecutionConfig())
    assert started == []


def test_a_cluster_is_joined_without_either(
    started: list[dict[str, Any]], environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "_check_answers", lambda _: None)
    local_ray.start_ray(ExecutionConfig(ray_address="10.0.0.1:6379"))
    assert "_temp_dir" not in started[0]
    assert not environment.exists()
    assert not (tmp_path / "temporary").exists()


HOLDS = """
import time
import ray
from fedsir.clients.local_ray import start_ray
from fedsir.config.training import ExecutionConfig
start_ray(ExecutionConfig())
print(ray.get_runtime_context().gcs_address, flush=True)
time.sleep(600)
"""
JOINS = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False, _node_ip_address="127.0.0.1")
print("joined", ray.get(ray.put(1)))
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """Names of sockets cannot be long."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def holder(short: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a Ray of its own, whose address is the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env={**os.environ, "RAY_TMPDIR": str(short)}
    )
    yield process
    process.terminate()
    process.communicate(timeout=60)


def joins(address: str, home: Path) -> subprocess.CompletedProcess[str]:
    # Without this variable Ray takes the address of a network card for the loopback address.
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        if name in os.environ:
            environment[name] = os.environ[name]
    return subprocess.run(
        [sys.executable, "-c", JOINS, address], capture_output=True, text=True, timeout=60, env=environment
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_who_has_no_token_cannot_join(
    holder: subprocess.Popen[str], short: Path, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert holder.stdout is not None
    address = holder.stdout.readline().strip()
    time.sleep(2)
    assert {each.is_local for each in listening.listening(processes.tree(holder.pid))} == {True}
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    allowed = joins(address, environment)
    assert "joined 1" in allowed.stdout, allowed.stderr
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    wrong = joins(address, environment)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    without = joins(address, tmp_path)
    for refused in (wrong, without):
        assert refused.returncode != 0
        assert "joined" not in refused.stdout
        assert "oken" in refused.stderr
    if os.getuid() == 0:
        # The superuser's tests can look with somebody else's eyes.
        private = short / "ray-0"
        looked = subprocess.run(["ls", str(private)], capture_output=True, text=True, user=65534)
        assert "Permission denied" in looked.stderr
