"""The GPU measurement: what it reads from nvidia-smi, and a dry run on CPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cluster.gpu_bench import Size, parse_fractions, random_images
from cluster.gpu_watch import GpuWatch, actor_megabytes, mean_utilisation, parse_compute_apps
from fedsir.errors import BadInput

SIZE = Size("cpu", 4, 200, 40, 32, "tiny", 16, 2, deterministic=True)


def test_output_of_nvidia_smi_is_read() -> None:
    assert mean_utilisation(["0, 90\n", "1, 70\n", "0, [N/A]\n", "\n"]) == 80.0
    assert mean_utilisation([]) is None
    assert parse_compute_apps("17, 1000\n18, [N/A]\n\nnonsense\n") == {17: pytest.approx(1048.576)}


def test_nvidia_smi_that_is_missing_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with GpuWatch(enabled=True) as watch:
        pass
    assert watch.utilisation() is None
    assert actor_megabytes([os.getpid()], "cuda") is None


def test_memory_of_a_process_is_read() -> None:
    found = actor_megabytes([os.getpid()], "cpu")
    assert found is not None
    assert found > 10
    assert actor_megabytes([2**30], "cpu") is None


def test_watch_notes_what_is_said_after_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, 50'\necho '1, 100'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with GpuWatch(enabled=True) as watch:
        assert watch._reader is not None
        watch._reader.join(timeout=30)
    assert watch.utilisation() == 75.0
    watch.forget()
    assert watch.utilisation() is None


@pytest.mark.parametrize("text", ["", "0", "2", "a", "0.5,,1"])
def test_fractions_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--fractions"):
        parse_fractions(text)


def test_images_have_the_size_of_the_release_and_disjoint_patients() -> None:
    dataset = random_images(SIZE)
    assert dataset.train.images.shape == (200, 32, 32)
    assert dataset.train.images.dtype == np.uint8
    assert not set(dataset.train.patients) & set(dataset.test.patients)
    assert np.array_equal(random_images(SIZE).train.images, dataset.train.images)


@pytest.mark.slow
def test_dry_run_compares_rates_and_bits() -> None:
    options = "--device cpu --clients 4 --train-images 400 --test-images 50 --pixels 32 --backbone tiny --batch 16"
    ended = subprocess.run(
        [sys.executable, "-m", "cluster.gpu_bench", *options.split(), "--rounds", "2", "--fractions", "1,0.5"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "two runs, the same bits: yes" in ended.stdout
    assert "all fractions, the same bits: yes" in ended.stdout
    rows = re.findall(r"│\s+([\d.]+) │\s+(\d+) │\s+(\d+) │\s+([\d.]+) │\s+– │\s+(\d+) MB │", ended.stdout)
    assert [(fraction, actors) for fraction, actors, *_ in rows] == [("1", "1"), ("0.5", "2")]
    assert all(int(rate) > 0 and int(memory) > 100 for _, _, rate, _, memory in rows)
