"""How a process computes on its GPU. Apart from `engine`, whose Lightning the program with actors does without."""

from __future__ import annotations

import os
from typing import Any

import torch

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Without it matrix products on GPUs may differ from call to call, and torch refuses them in deterministic mode."""


def gpu_options(deterministic: bool) -> dict[str, Any]:
    """Ray options of actors on GPUs: what must be in their environment before CUDA starts."""
    return {"runtime_env": {"env_vars": dict([CUBLAS_WORKSPACE])}} if deterministic else {}


def set_gpu_numerics(deterministic: bool) -> None:
    """How this process computes on its GPU; CPUs are deterministic anyway and their bits do not depend on it.

    deterministic: the same bits every time on GPUs of one kind, and an error from operations that cannot be so.
    Otherwise TF32 and whatever algorithms prove fastest.
    """
    if deterministic:
        # Read when the first matrix product is prepared. Actors get it from their environment already.
        os.environ.setdefault(*CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(deterministic)
    # Nobody reads memory that nobody has written, and filling it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.allow_tf32 = not deterministic
    torch.set_float32_matmul_precision("highest" if deterministic else "high")
