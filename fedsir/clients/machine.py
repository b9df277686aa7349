"""What this machine lets the process use: cores, memory and GPUs under SLURM, cgroup and affinity limits."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsir.environment import environment

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
SHARED_MEMORY = Path("/dev/shm")
DEVICES = Path("/dev")
GPU_FILES = ("nvidia*", "nvhost*", "kfd", "dxg")
"""By which Linux gives programs NVIDIA's GPUs, those of its boards, AMD's, and those of Windows around it."""

PCI = Path("/sys/bus/pci/devices")
GPU_VENDORS = {"0x10de", "0x1002"}
"""NVIDIA and AMD. Their device files may be made only when somebody asks for a GPU."""

NVML_CHECK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Tells torch to count GPUs without starting CUDA, as Lightning does by its import."""

STORE_SHARE = 0.3
"""Share of the memory that Ray gives to its object store."""

SHARED_SHARE = 0.9
"""Most of the shared memory that is free; beyond it Ray would place the store on disk."""

SMALLEST_STORE = 80 * 2**20
"""Bytes; Ray refuses an object store under 75 MiB."""

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What a process may use, each by what sets it (`cores`, `affinity`, `cgroup quota`, a SLURM variable).

    cpus: whole cores, at least 1. memory: bytes.
    """

    cpus: Mapping[str, int]
    memory: Mapping[str, int]

    @property
    def usable_cpus(self) -> int:
        """The smallest limit of cores."""
        return min(self.cpus.values())

    @property
    def usable_memory(self) -> int:
        """The smallest limit of bytes."""
        return min(self.memory.values())

    def text(self) -> str:
        """All limits of cores in one line."""
        return ", ".join(f"{name} {number}" for name, number in self.cpus.items())


def machine_limits(
    environment: Mapping[str, str] | None = None, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> Limits:
    """Limits of this process.

    environment: of the process by default. cgroups: where the cgroup file systems (version 1 or 2) are mounted.
    membership: the file that names the groups of the process.
    """
    env = os.environ if environment is None else environment
    cpus = {"cores": os.cpu_count() or 1}
    if hasattr(os, "sched_getaffinity"):
        cpus["affinity"] = len(os.sched_getaffinity(0))
    quotas = [max(1, int(quota)) for quota in _cpu_quotas(cgroups, membership)]
    if quotas:
        cpus["cgroup quota"] = min(quotas)
    for name in ("SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK"):
        if (value := _positive(env.get(name))) is not None:
            cpus[name] = value
    memory = {"memory": _physical_memory()}
    if limits := list(_memory_limits(cgroups, membership)):
        memory["cgroup limit"] = min(limits)
    if (per_node := _positive(env.get("SLURM_MEM_PER_NODE"))) is not None:
        memory["SLURM_MEM_PER_NODE"] = per_node * MIB
    on_node = _positive(env.get("SLURM_CPUS_ON_NODE"))
    if (per_cpu := _positive(env.get("SLURM_MEM_PER_CPU"))) is not None and on_node is not None:
        memory["SLURM_MEM_PER_CPU"] = per_cpu * on_node * MIB
    return Limits(cpus, memory)


def visible_gpus(devices: Path = DEVICES, pci: Path = PCI) -> int:
    """GPUs that torch sees on this machine; `CUDA_VISIBLE_DEVICES` counts.

    devices, pci: where Linux shows files and vendors of devices. Where neither tells of a GPU, torch is not asked: Ray
    starts while it loads.
    """
    if sys.platform == "linux" and not _tells_of_a_gpu(devices, pci):
        return 0
    import torch

    with environment(NVML_CHECK):
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _tells_of_a_gpu(devices: Path, pci: Path) -> bool:
    files = any(any(devices.glob(name)) for name in GPU_FILES)
    return files or any(_read(vendor) in GPU_VENDORS for vendor in pci.glob("*/vendor"))


def ray_resources(limits: Limits, gpus: int, shared_memory: Path = SHARED_MEMORY) -> dict[str, Any]:
    """Arguments of `ray.init` for a Ray of this machine, where it would not find the limits by itself.

    The GPUs are always given: torch must be able to use what Ray counts, and a CPU build of torch sees none.
    """
    resources: dict[str, Any] = {"num_gpus": gpus}
    if limits.usable_cpus < limits.cpus["cores"]:
        resources["num_cpus"] = limits.usable_cpus
    if limits.usable_memory < limits.memory["memory"]:
        store = STORE_SHARE * limits.usable_memory
        if shared_memory.is_dir():
            store = min(store, SHARED_SHARE * shutil.disk_usage(shared_memory).free)
        resources["object_store_memory"] = max(SMALLEST_STORE, int(store))
    return resources


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _positive(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


def _cpu_quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    for folder in _folders(cgroups, membership, "cpu"):
        unified = _read(folder / "cpu.max").split()
        if len(unified) == 2 and unified[0].isdecimal():
            yield int(unified[0]) / int(unified[1])
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        # -1 stands for no quota.
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            yield int(quota) / int(period)


def _memory_limits(cgroups: Path, membership: Path) -> Iterator[int]:
    for folder in _folders(cgroups, membership, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            # `max`, or in version 1 a number beyond any memory, stands for no limit.
            if (text := _read(folder / name)).isdecimal():
                yield int(text)


def _folders(cgroups: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups of this process for one controller, innermost first; limits of all of them hold.

    Inside a container the named group may not exist below the mount, whose root is then the container's own group.
    """
    for line in _read(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root = cgroups
        elif controller in controllers.split(","):
            root = next((cgroups / n for n in (controllers, controller) if (cgroups / n).is_dir()), cgroups)
        else:
            continue
        folder = root / path.lstrip("/")
        yield from (f for f in (folder, *folder.parents) if f == root or root in f.parents)


def _read(file: Path) -> str:
    try:
        return file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
