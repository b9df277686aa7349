"""Nothing that the commands start can be reached from other machines unless somebody asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SCRIPT = Path(__file__).with_name("listening.py")
OPENS = """
import socket, sys, time
kind = socket.SOCK_DGRAM if sys.argv[2] == "udp" else socket.SOCK_STREAM
opened = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, kind)
opened.bind((sys.argv[1], 0))
if sys.argv[2] == "tcp":
    opened.listen()
print(opened.getsockname()[1], flush=True)
time.sleep(600)
"""


def look(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_open_sockets_are_seen(address: str, is_local: bool, protocol: str) -> None:
    """Also those of a child of the process that is asked about."""
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {OPENS!r}, *sys.argv[1:]])"
    process = subprocess.Popen(
        [sys.executable, "-c", starts, address, protocol], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            pytest.skip(f"this machine has no {address}")
        found = look("--pid", str(process.pid))
    finally:
        subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=True)
        process.communicate()
    shown = address.removeprefix("::ffff:")
    assert f"| python -c | {protocol} | {shown} | {port} |" in found.stdout
    assert found.returncode == int(not is_local)
    assert (f"{protocol} {address} port {port}" in found.stderr) == (not is_local)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "processes"),
    [
        ("run", {"gcs_server", "raylet", "ray::ClientActor"}),
        ("sweep run", {"gcs_server", "raylet", "ray::ClientActor"}),
        ("compare", {"gcs_server", "raylet", "ray::ClientActor"}),
        ("tracking serve", {"uvicorn"}),
        ("ui", {"uvicorn"}),
    ],
)
def test_commands_listen_on_the_loopback_address_alone(
    command: str, processes: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = look(command)
    with capsys.disabled():
        print(f"\n{found.stdout}")
    assert (found.returncode, found.stderr) == (0, "")
    named = {line.split(" | ")[1] for line in found.stdout.splitlines()[2:]}
    assert processes <= named, "what is known to listen was not seen"
