"""What `nvidia-smi` says while something works: how busy GPUs are and what memory processes hold."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

SAMPLE_MS = 500


class GpuWatch:
    """Context in which the use of all visible GPUs is noted; unless `enabled`, or without nvidia-smi, nothing is."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> GpuWatch:
        if self._enabled:
            query = ["--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits", f"--loop-ms={SAMPLE_MS}"]
            try:
                self._process = subprocess.Popen(["nvidia-smi", *query], stdout=subprocess.PIPE, text=True)
            except OSError:
                return self
            self._reader = threading.Thread(target=self._read, name="gpu watch", daemon=True)
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        if self._reader is not None:
            self._reader.join()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._lines.extend(self._process.stdout)

    def forget(self) -> None:
        """Leave out what was noted so far."""
        self._lines.clear()

    def utilisation(self) -> float | None:
        """Mean per cent over samples and GPUs, None where nothing was noted."""
        return mean_utilisation(self._lines)


def mean_utilisation(lines: Iterable[str]) -> float | None:
    """Mean of the second column of `index, per cent` lines; what is not a number is left out."""
    found = [float(text) for line in lines if (text := line.partition(",")[2].strip()).isdecimal()]
    return sum(found) / len(found) if found else None


def actor_megabytes(pids: Sequence[int], device: str) -> float | None:
    """Mean memory of the actors: on their GPU, or on CPUs their share of resident pages; None where nobody tells.

    In containers nvidia-smi may know processes by other numbers.
    """
    known = _gpu_megabytes() if device == "cuda" else {pid: _resident_megabytes(pid) for pid in pids}
    found = [megabytes for pid in pids if (megabytes := known.get(pid)) is not None]
    return sum(found) / len(found) if found else None


def _gpu_megabytes() -> dict[int, float | None]:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return parse_compute_apps(text)


def parse_compute_apps(text: str) -> dict[int, float | None]:
    """Megabytes (10⁶ bytes) by process of `pid, MiB` lines."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 1]
    return {int(pid): float(mib) * 2**20 / 1e6 for pid, mib in rows if pid.isdecimal() and mib.isdecimal()}


def _resident_megabytes(pid: int) -> float | None:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:")), None)
