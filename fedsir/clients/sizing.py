"""How many actors a pool has, and what share of a GPU each of them gets."""

from __future__ import annotations

from math import ceil

from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput


def gpu_fraction(config: ExecutionConfig, clients: int, gpus: float) -> float:
    """GPU fraction of each actor; where the configuration leaves it open, GPUs are used if there are any.

    One actor per GPU, or the largest equal share that lets the configured number of actors fit.
    """
    if config.gpus_per_client is not None:
        return config.gpus_per_client
    if config.device == "cpu" or (config.device == "auto" and gpus < 1):
        return 0.0
    if gpus < 1:
        return 1.0
    if isinstance(config.actors, int):
        actors = min(config.actors, clients)
    else:
        actors = clients if config.actors == "per-client" else min(clients, int(gpus))
    return 1.0 / ceil(actors / int(gpus))


def pool_size(config: ExecutionConfig, clients: int, cpus: float, gpus: float) -> tuple[int, float]:
    """Number of actors and GPU fraction of each.

    Raises BadInput when the cluster cannot hold them.
    """
    fraction = gpu_fraction(config, clients, gpus)
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
    fits = clients
    if fraction > 0:
        # Whole copies of the fraction on each GPU: 0.4 fits twice on one GPU, not two and a half times.
        fits = int(gpus) * int(1 / fraction + 1e-9) if fraction <= 1 else int(gpus / fraction)
    if config.actors == "per-client":
        actors = clients
    elif isinstance(config.actors, int):
        actors = min(config.actors, clients)
    elif fraction > 0:
        actors = max(1, min(clients, fits))
    else:
        actors = max(1, min(clients, int(cpus) // config.threads))
    if fraction > 0 and actors > fits:
        raise BadInput(
            f"execution: {actors} actors with {fraction:g} GPU each do not fit: Ray sees {gpus:g} GPUs, which "
            f"hold {fits}.\nLower execution.gpus_per_client or execution.actors, or set execution.device to cpu."
        )
    return actors, fraction
