"""What keeps a grid from working and can be known while it is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from experiments.checks import check_execution, check_image_size
from experiments.expansion import Plan, absent_files
from experiments.sweeps.estimate import Estimate, RunEstimate
from fedsir.errors import BadInput, first_line
from fedsir.federation.noise import transitions
from fedsir.models.weights import check_weights


def find_faults(plan: Plan, estimate: Estimate) -> list[str]:
    """Reasons why runs of the plan cannot work, each once with the number of runs; settings not given are none."""
    found: dict[str, int] = {}
    for e in estimate.runs:
        for fault in dict.fromkeys(_faults(e)):
            found[fault] = found.get(fault, 0) + 1
    everything = len(estimate.runs)
    reasons = [
        fault if number == everything else f"{fault} ({number} of {everything} runs)" for fault, number in found.items()
    ]
    return [*absent_files(plan), *reasons]


def _faults(e: RunEstimate) -> Iterator[str]:
    config, source = e.run.config, e.run.source
    yield from _images(e)
    if e.facts.classes is not None:
        yield from _refused(partial(transitions, config.federation.noise, e.facts.classes), f"{source}: ")
    yield from _refused(partial(check_image_size, config.model, config.data.image_size))
    yield from _refused(partial(check_weights, config.model))
    yield from _refused(partial(check_execution, config.execution, config.federation.clients))


def _refused(check: Callable[[], object], where: str = "") -> Iterator[str]:
    """The first line of what a check objects to."""
    try:
        check()
    except BadInput as error:
        yield where + first_line(error)


def _images(e: RunEstimate) -> Iterator[str]:
    if e.facts.train is None:
        return
    federation, source = e.run.config.federation, e.run.source
    left = e.facts.train - e.pool
    if left <= 0:
        yield f"{source}: federation.public_pool is {e.pool}, but there are only {e.facts.train} training images"
        return
    smallest = federation.partition.min_client_size
    if federation.clients * smallest > left:
        yield (
            f"{source}: {federation.clients} clients with federation.partition.min_client_size {smallest} need "
            f"{federation.clients * smallest} training images, but there are {left} beside the public pool"
        )
