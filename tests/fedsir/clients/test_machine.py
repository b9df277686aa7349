"""What the process may use under cgroups, SLURM and affinity, read from fake files and variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedsir.clients import machine
from fedsir.clients.machine import Limits, machine_limits, ray_resources

GIB = 2**30
Tree = Callable[..., Limits]


@pytest.fixture
def limits_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Limits of a process on 64 cores and 256 GiB with the given cgroup files, membership and variables."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)), raising=False)
    monkeypatch.setattr(machine, "_physical_memory", lambda: 256 * GIB)

    def limits(files: dict[str, str], membership: str = "0::/\n", **variables: str) -> Limits:
        for name, text in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (tmp_path / "membership").write_text(membership)
        return machine_limits(variables, tmp_path / "cgroup", tmp_path / "membership")

    return limits


def test_without_limits_cores_and_affinity_count(limits_of: Tree) -> None:
    found = limits_of({})
    assert (found.usable_cpus, found.usable_memory) == (48, 256 * GIB)
    assert found.text() == "cores 64, affinity 48"


def test_quota_and_memory_of_a_container(limits_of: Tree) -> None:
    """Version 2, seen from inside: the mount is the group of the container itself."""
    found = limits_of({"cpu.max": "650000 100000\n", "memory.max": f"{8 * GIB}\n"})
    assert (found.usable_cpus, found.usable_memory) == (6, 8 * GIB)


def test_limits_of_outer_groups_hold_as_well(limits_of: Tree) -> None:
    files = {
        "system.slice/job/step/cpu.max": "max 100000\n",
        "system.slice/job/cpu.max": "400000 100000\n",
        "system.slice/job/step/memory.max": f"{9 * GIB}\n",
        "system.slice/memory.max": "max\n",
        "other/cpu.max": "100000 100000\n",
    }
    found = limits_of(files, "0::/system.slice/job/step\n")
    assert (found.usable_cpus, found.usable_memory) == (4, 9 * GIB)


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_version_1_has_a_tree_for_each_controller(limits_of: Tree, mount: str) -> None:
    files = {
        f"{mount}/slurm/job/cpu.cfs_quota_us": "300000\n",
        f"{mount}/slurm/job/cpu.cfs_period_us": "100000\n",
        f"{mount}/slurm/cpu.cfs_quota_us": "-1\n",
        f"{mount}/slurm/cpu.cfs_period_us": "100000\n",
        "memory/slurm/job/memory.limit_in_bytes": f"{5 * GIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    found = limits_of(files, f"4:memory:/slurm/job\n3:{mount}:/slurm/job\n1:cpuset:/x\n0::/\n")
    assert (found.usable_cpus, found.usable_memory) == (3, 5 * GIB)


def test_less_than_a_core_is_one(limits_of: Tree) -> None:
    assert limits_of({"cpu.max": "50000 100000"}).usable_cpus == 1


def test_slurm_says_what_the_job_has(limits_of: Tree) -> None:
    found = limits_of({}, SLURM_CPUS_ON_NODE="16", SLURM_CPUS_PER_TASK="8", SLURM_MEM_PER_CPU="2048")
    assert (found.usable_cpus, found.usable_memory) == (8, 32 * GIB)
    found = limits_of({}, SLURM_CPUS_ON_NODE="16", SLURM_MEM_PER_NODE="4096")
    assert (found.usable_cpus, found.usable_memory) == (16, 4 * GIB)
    # 0 stands for the whole memory of the node.
    assert limits_of({}, SLURM_CPUS_ON_NODE="", SLURM_MEM_PER_NODE="0").usable_memory == 256 * GIB


def test_ray_is_told_what_it_would_not_find(limits_of: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = limits_of({"cpu.max": "400000 100000", "memory.max": f"{10 * GIB}"})
    assert ray_resources(limited, 0, tmp_path / "none") == {
        "num_gpus": 0,
        "num_cpus": 4,
        "object_store_memory": 3 * GIB,
    }
    # Shared memory of containers is small, and an object store beyond it would be on disk.
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB))
    assert ray_resources(limited, 0, tmp_path)["object_store_memory"] == int(0.9 * GIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    assert ray_resources(limited, 0, tmp_path)["object_store_memory"] >= 75 * 2**20


def test_ray_finds_the_rest_by_itself() -> None:
    unlimited = Limits({"cores": 8, "affinity": 8}, {"memory": 16 * GIB})
    assert ray_resources(unlimited, 3) == {"num_gpus": 3}


@pytest.mark.parametrize("file", ["nvidiactl", "nvhost-gpu", "kfd", "dxg"])
def test_gpus_that_torch_cannot_use_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str) -> None:
    """As with `CUDA_VISIBLE_DEVICES=""` or a CPU build of torch on a machine with GPUs."""
    (tmp_path / file).touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert machine.visible_gpus(tmp_path, tmp_path) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.visible_gpus(tmp_path, tmp_path) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch is asked")
@pytest.mark.parametrize(("vendor", "counted"), [("0x10de", 2), ("0x1002", 2), ("0x1af4", 0)])
def test_gpus_whose_files_nobody_has_made_yet_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, counted: int
) -> None:
    """On servers without a display the first program that asks for a GPU has them made."""
    (tmp_path / "0000:00:05.0").mkdir()
    (tmp_path / "0000:00:05.0" / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert machine.visible_gpus(tmp_path, tmp_path) == counted


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch is asked")
def test_without_a_device_torch_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "null").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("torch was asked"))
    assert machine.visible_gpus(tmp_path, tmp_path) == 0
