"""What keeps a grid from working and can be known while it is planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.config import RunFile
from experiments.expansion import Plan, absent_files
from experiments.sweeps.calibration import gpus
from experiments.sweeps.estimate import Estimate, RunEstimate
from fedsir.config.training import ModelConfig
from fedsir.errors import BadInput, first_line
from fedsir.federation.noise import transitions


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
    config = e.run.config
    yield from _images(e)
    if e.facts.classes is not None:
        try:
            transitions(config.federation.noise, e.facts.classes)
        except BadInput as error:
            yield f"{e.run.source}: {first_line(error)}"
    yield from _model(config)
    if config.execution.ray_address is None and config.execution.device == "cuda" and gpus() == 0:
        yield "execution.device is cuda, but torch sees no GPU on this machine"


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


def _model(config: RunFile) -> Iterator[str]:
    from fedsir.models.network import MIN_IMAGE_SIZE

    model, size = config.model, config.data.image_size
    if model.backbone != "tiny" and size < MIN_IMAGE_SIZE:
        yield f"data.image_size is {size}, but the backbone {model.backbone} needs {MIN_IMAGE_SIZE} or more"
    yield from _weights(model)


def _weights(model: ModelConfig) -> Iterator[str]:
    tiny = model.backbone == "tiny"
    if model.weights == "imagenet" and tiny:
        yield "model.weights: there are no ImageNet weights for the backbone tiny"
    elif model.weights == "phantom-pretext" and not tiny:
        yield f"model.weights: phantom-pretext is for the backbone tiny, not {model.backbone}"
    elif model.weights not in _NAMED and not Path(model.weights).expanduser().is_file():
        yield f"model.weights: no such file: {model.weights}"


_NAMED: Sequence[str] = ("imagenet", "random", "phantom-pretext")
