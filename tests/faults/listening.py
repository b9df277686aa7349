"""Every socket on which `fedsir` and what it starts can be reached while it works; run as a file, Linux only.

    python tests/faults/listening.py                 every command below, one after the other
    python tests/faults/listening.py run ui          some of them
    python tests/faults/listening.py --pid 1234      a process that is running, and its descendants

Prints a Markdown table. Exit code 1 where something can be reached from other machines, or a command fails.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from processes import ENDED, PROC, name, tree

FEDSIR = [sys.executable, "-c", "from experiments.cli import main; main()"]
LOOK_S = 0.1
STAYS_S = 3.0
"""How long a server is watched once it answers."""
ENDS_WITHIN_S = 300

SETTINGS = ("federation.clients=2", "training.rounds=4", "execution.actors=2")
TINY = Path(__file__).parents[1] / "tiny.yaml"
GRID = f"""
name: tiny
base: {TINY}
set: [{", ".join(SETTINGS)}]
methods: [oct_fedsir, fedavg]
seeds: [0, 1]
"""
# State in the kernel's tables: accepting connections, and for datagrams receiving from anybody.
TABLES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
SERVES = {"ui": r"^MLflow at ", "tracking serve": r"^tracking server at "}
COMMANDS = ("run", "sweep run", "compare", "tracking serve", "ui")


@dataclass(frozen=True, order=True)
class Listening:
    """A socket that others may send to."""

    process: str
    protocol: str
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return plain(ip_address(self.address)).is_loopback


def plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """An IPv4 address where it is written as one of IPv6."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def address_of(text: str) -> IPv4Address | IPv6Address:
    """From the kernel's notation: hexadecimal words of 32 bits in the order of this machine."""
    raw = bytes.fromhex(text)
    words = [raw[i : i + 4] for i in range(0, len(raw), 4)]
    return plain(ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)))


def listening(pids: Iterable[int]) -> set[Listening]:
    """Of processes all sockets that listen, by what the kernel says."""
    owners: dict[str, int] = {}
    for pid in pids:
        try:
            targets = [str(descriptor.readlink()) for descriptor in (PROC / str(pid) / "fd").iterdir()]
        except OSError:  # it, or one of its files, has just gone: the next look finds what is left
            continue
        owners.update((inode, pid) for target in targets for inode in re.findall(r"^socket:\[(\d+)\]$", target))
    found = set()
    for protocol, state in TABLES.items():
        table = PROC / "net" / protocol
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            cells = line.split()
            if cells[3] == state and cells[9] in owners:
                address, port = cells[1].split(":")
                owner = name(owners[cells[9]])
                found.add(Listening(owner, protocol.removesuffix("6"), str(address_of(address)), int(port, 16)))
    return found


class Watch(threading.Thread):
    """Looks at a process and its descendants again and again and remembers every socket that was there once."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        # Processes of Ray change their names, and what has just been started has that of who did it.
        self._found: dict[tuple[str, str, int], Listening] = {}
        self._pid = pid
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            for each in listening(tree(self._pid)):
                key = (each.protocol, each.address, each.port)
                if each.process != ENDED or key not in self._found:
                    self._found[key] = each

    def stop(self) -> set[Listening]:
        self._over.set()
        self.join()
        return set(self._found.values())


def watched(command: str, folder: Path) -> set[Listening]:
    """Sockets during one command, from its start to its end; a server is ended with Ctrl-C once it has been seen."""
    process = subprocess.Popen(
        [*FEDSIR, *words(command, folder)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    watch = Watch(process.pid)
    watch.start()
    late = threading.Timer(ENDS_WITHIN_S, process.kill)
    late.start()
    text = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            text += line
            if command in SERVES and re.search(SERVES[command], line):
                time.sleep(STAYS_S)
                process.send_signal(signal.SIGINT)
        code = process.wait()
    finally:
        late.cancel()
        found = watch.stop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        raise SystemExit(f"fedsir {command} ended with code {code}:\n{text}")
    return found


def words(command: str, folder: Path) -> list[str]:
    """Command line of a command, with its own defaults for everything that concerns addresses except the port."""
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    match command:
        case "run":
            return ["run", str(TINY), *settings]
        case "sweep run":
            (folder / "tiny.yaml").write_text(GRID, encoding="utf-8")
            return ["sweep", "run", "tiny.yaml"]
        case "compare":
            return ["compare", str(TINY), "--methods", "fedavg,fedprox", "--seeds", "0", *settings]
        case _:
            return [*command.split(), "--port", str(free_port())]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(by_command: dict[str, set[Listening]]) -> str:
    """Markdown: sockets of the same process and address in one line."""
    lines = ["| command | process | protocol | address | ports |", "|---|---|---|---|---|"]
    for command, found in by_command.items():
        together: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for each in sorted(found):
            together[each.process, each.protocol, each.address].append(each.port)
        for key, ports in together.items():
            lines.append(f"| {command} | {' | '.join(key)} | {', '.join(map(str, ports))} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print the table; 0 where everything is local."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}; default: all")
    parser.add_argument("--pid", type=int, help="a process that is running, instead of commands")
    given = parser.parse_args(argv)
    unknown = set(given.commands) - set(COMMANDS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if given.pid is not None:
        by_command = {str(given.pid): listening(tree(given.pid))}
    else:
        with tempfile.TemporaryDirectory(prefix="fedsir-") as folder:
            # The store that is looked at is what another command has left; the server makes one where there is none.
            chosen = given.commands or list(COMMANDS)
            if chosen[0] == "ui":
                watched("tracking serve", Path(folder))
            by_command = {command: watched(command, Path(folder)) for command in chosen}
    print(table(by_command))
    beyond = [each for found in by_command.values() for each in found if not each.is_local]
    for each in sorted(beyond):
        print(f"beyond loopback: {each.process}, {each.protocol} {each.address} port {each.port}", file=sys.stderr)
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
