"""How many actors a pool has, and what share of a GPU each of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput


@dataclass(frozen=True)
class Node:
    """CPUs and GPUs of one machine as Ray counts them; `name` is what messages call it."""

    id: str
    name: str
    cpus: float
    gpus: float

    def holds(self, fraction: float) -> int:
        """How many actors with `fraction` > 0 of a GPU fit: whole copies of it on each GPU, or GPUs of their own.

        0.4 fits twice on one GPU, not two and a half times on two halves of different ones.
        """
        if fraction <= 1:
            return int(self.gpus) * int(1 / fraction + 1e-9)
        return int(self.gpus) // int(fraction)


def gpu_fraction(config: ExecutionConfig, clients: int, gpus: float, per_gpu: int | None = None) -> float:
    """GPU fraction of each actor; where the configuration leaves it open, GPUs are used if there are any.

    What was configured; else an equal share for the `per_gpu` actors that were measured to fit on one GPU; else one
    actor per GPU, or the largest equal share that lets the configured number of actors fit.
    """
    if isinstance(config.gpus_per_client, float):
        return config.gpus_per_client
    if config.device == "cpu" or (config.device == "auto" and gpus < 1):
        return 0.0
    if gpus < 1:
        return 1.0
    if per_gpu is not None:
        return 1.0 / per_gpu
    if isinstance(config.actors, int):
        actors = min(config.actors, clients)
    else:
        actors = clients if config.actors == "per-client" else min(clients, int(gpus))
    return 1.0 / ceil(actors / int(gpus))


def pool_size(
    config: ExecutionConfig, clients: int, nodes: Sequence[Node], per_gpu: int | None = None
) -> tuple[int, float]:
    """Number of actors and GPU fraction of each, on `nodes`; per_gpu: actors that were measured to fit on one GPU.

    Raises BadInput when the nodes cannot hold them.
    """
    gpus = float(sum(int(node.gpus) for node in nodes))
    fraction = gpu_fraction(config, clients, gpus, per_gpu)
    if fraction > 1 and fraction != int(fraction):
        raise BadInput(
            f"execution.gpus_per_client is {fraction:g}; more than one GPU must be a whole number.\n"
            "Use a fraction up to 1 or a whole number."
        )
    if fraction > 0 and config.device == "cpu":
        raise BadInput(
            f"execution.gpus_per_client is {fraction:g} but execution.device is cpu.\n"
            "Set execution.device to auto or cuda, or leave gpus_per_client out."
        )
    fits = sum(node.holds(fraction) for node in nodes) if fraction > 0 else clients
    cores = sum(int(node.cpus) // config.threads for node in nodes)
    if config.actors == "per-client":
        actors = clients
    elif isinstance(config.actors, int):
        actors = min(config.actors, clients)
    elif fraction > 0:
        # Memory may hold more actors than there are cores to drive them, which would only wait for each other.
        useful = fits if per_gpu is None else min(fits, max(cores, int(gpus)))
        actors = max(1, min(clients, useful))
    else:
        actors = max(1, min(clients, cores))
    if fraction > 0 and actors > fits:
        where = "" if len(nodes) == 1 else f" on {len(nodes)} nodes"
        raise BadInput(
            f"execution: {actors} actors with {fraction:g} GPU each do not fit: Ray sees {gpus:g} GPUs{where}, which "
            f"hold {fits}.\nLower execution.gpus_per_client or execution.actors, or set execution.device to cpu."
        )
    return actors, fraction
