"""Where a backbone's first weights come from; never a silent fallback to random ones."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsir.config.training import BackboneName, ModelConfig
from fedsir.errors import BadInput, first_line
from fedsir.files import is_file, user_path
from fedsir.models.pretext import load_pretext
from fedsir.models.tiny import TinyFeatures

CLASSIFIER_PREFIXES = ("classifier.", "fc.", "head.")
DOWNLOAD_TIMEOUT_S = 30.0
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)


def load_backbone_weights(backbone: nn.Module, config: ModelConfig) -> None:
    """Fill `backbone` as `config.weights` says, strictly: every tensor must be there with its shape.

    Raises BadInput when the weights are missing, unreadable or of another architecture.
    """
    check_weights(config)
    if config.weights == "random":
        return
    if config.weights == "phantom-pretext":
        assert isinstance(backbone, TinyFeatures)  # as was checked
        load_pretext(backbone)
        return
    if config.weights == "imagenet":
        state, origin = _imagenet_state(config.backbone), "torchvision's ImageNet weights"
    else:
        path = user_path(Path(config.weights), "model.weights")
        state, origin = _read_state(path), str(path)
    _load_strictly(backbone, state, config.backbone, origin)


def check_weights(config: ModelConfig) -> None:
    """What can be found wrong with `config.weights` without reading or downloading them. Raises BadInput."""
    if config.weights == "phantom-pretext":
        if config.backbone != "tiny":
            raise BadInput(
                f"model.weights: phantom-pretext exists only for the backbone tiny, not for {config.backbone}.\n"
                "Use imagenet, random or the path of a weights file."
            )
    elif config.weights == "imagenet":
        if config.backbone == "tiny":
            raise BadInput(
                "model.weights: there are no ImageNet weights for the backbone tiny.\n"
                "Use phantom-pretext, random or the path of a weights file."
            )
    elif config.weights != "random":
        path = user_path(Path(config.weights), "model.weights")
        if not is_file(path):
            raise BadInput(
                f"model.weights: no such file: {path}.\nUse imagenet, random, phantom-pretext or the path of a file."
            )


def _imagenet_state(backbone: BackboneName) -> Mapping[str, Tensor]:
    import torchvision  # see `network`

    weights = torchvision.models.get_model_weights(backbone).DEFAULT
    url: str = weights.url
    file = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    try:
        with _network_timeout(DOWNLOAD_TIMEOUT_S):
            # The hash is checked after a download only, and files that are there already may hold code.
            state: Mapping[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except Exception as error:  # of the network, the disk or a damaged file, of any kind; the cause is kept
        if file.exists():
            raise BadInput(
                f"model.weights: {file} does not hold the imagenet weights of {backbone} ({_reason(error)}).\n"
                f"Remove it to download it again, or replace it by the file from {url}."
            ) from error
        raise BadInput(
            f"model.weights: imagenet weights of {backbone} could not be downloaded ({first_line(error)}).\n"
            f"On a machine without network, place the file {file.name} (from {url}) at {file},\n"
            "or set model.weights to the path of a weights file of this architecture."
        ) from error
    return state


@contextmanager
def _network_timeout(seconds: float) -> Iterator[None]:
    # torch.hub opens the address without a time-out, and an unanswered connection would hang for minutes.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _read_state(path: Path) -> Mapping[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            state: object = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile file may raise anything; the cause is kept
        raise BadInput(
            f"model.weights: {path} cannot be read as plain tensors ({_reason(error)}).\n"
            "It must be a state_dict saved by torch.save or safetensors; files with pickled code are refused."
        ) from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(
        isinstance(n, str) and isinstance(v, Tensor) for n, v in state.items()
    ):
        raise BadInput(f"model.weights: {path} holds no state_dict (a mapping from names to tensors).")
    if any(name.startswith("backbone.") for name in state):
        # A file that fedsir itself recorded at the end of a run.
        state = {n.removeprefix("backbone."): v for n, v in state.items() if n.startswith("backbone.")}
    return state


def _reason(error: Exception) -> str:
    # What torch says of refused pickles recommends to load them all the same.
    return "refused by torch" if isinstance(error, UnpicklingError) else first_line(error)


def _load_strictly(backbone: nn.Module, state: Mapping[str, Tensor], name: str, origin: str) -> None:
    wanted = backbone.state_dict()
    given = {n: v for n, v in state.items() if n in wanted or not n.startswith(CLASSIFIER_PREFIXES)}
    missing = sorted(set(wanted) - set(given))
    unexpected = sorted(set(given) - set(wanted))
    both = sorted(set(wanted) & set(given))
    # Tensors without a shape of their own are of other kinds.
    other_shape = [n for n in both if not given[n].is_nested and wanted[n].shape != given[n].shape]
    if missing or unexpected or other_shape:
        faults = [
            f"{len(names)} {what} (first: {names[0]})"
            for what, names in (
                ("missing", missing),
                ("unexpected", unexpected),
                ("of another shape", other_shape),
            )
            if names
        ]
        raise BadInput(
            f"model.weights: {origin} does not belong to the backbone {name}: of {len(wanted)} tensors "
            f"{', '.join(faults)}.\nSet model.backbone to the file's architecture or give another file."
        )
    unusable = [n for n, v in given.items() if not _usable(v, wanted[n])]
    if unusable:
        raise BadInput(
            f"model.weights: {origin}: {len(unusable)} of {len(wanted)} tensors (first: {unusable[0]}) hold something "
            "else than finite plain numbers.\nGive a file of trained weights."
        )
    backbone.load_state_dict(given, strict=True)


def _usable(given: Tensor, wanted: Tensor) -> bool:
    """Whether all numbers can be copied: real or whole ones as wanted, and finite."""
    plain = not given.is_nested and given.layout == torch.strided and not given.is_meta and given.dtype in _PLAIN
    alike = plain and given.is_floating_point() == wanted.is_floating_point()
    return alike and bool(torch.isfinite(given).all())
