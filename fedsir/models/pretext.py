"""`TinyFeatures` started from a pretext task: regress the geometry of phantoms, not their diseases.

It plays for the small network the part that ImageNet weights play for the large ones: features that already
tell structures apart, learnt without a single label of the task at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedsir.data.phantom import PRETEXT_SEED_START, draw_patient, draw_scan
from fedsir.data.phantom.cohorts import COHORTS
from fedsir.data.phantom.geometry import GEOMETRY_NAMES, geometry
from fedsir.errors import BadInput
from fedsir.models.tiny import TinyFeatures
from fedsir.seeding import Stream, generator, integer

PRETEXT_FILE: Final = Path(__file__).parent / "pretrained" / "tiny_phantom_pretext.safetensors"
DEFAULT_IMAGES: Final = 15_000
DEFAULT_EPOCHS: Final = 16

_BATCH = 64
_LEARNING_RATE = 5e-3
_SCANS_PER_PATIENT = 2
# Mostly the size that small machines train at; the others keep the features from depending on it.
_SIZES = ((64, 0.8), (32, 0.12), (128, 0.08))

Group = tuple[NDArray[np.uint8], NDArray[np.float32]]


def pretrain(
    seed: int = 0,
    images: int = DEFAULT_IMAGES,
    epochs: int = DEFAULT_EPOCHS,
    on_epoch: Callable[[int, float], None] | None = None,
) -> TinyFeatures:
    """Train a fresh `TinyFeatures` on `images` phantoms of all cohorts; `on_epoch` gets (epoch, mean loss).

    The phantoms have the seed `PRETEXT_SEED_START + seed`, which no data set may use. One thread throughout:
    the same machine and torch build give the same weights bit for bit.
    """
    if images < _BATCH * len(_SIZES) or epochs < 1:
        raise BadInput(f"pre-training needs {_BATCH * len(_SIZES)} images and one epoch, got {images} and {epochs}.")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _pretrain(seed, images, epochs, on_epoch)
    finally:
        torch.set_num_threads(threads)


def _pretrain(seed: int, images: int, epochs: int, on_epoch: Callable[[int, float], None] | None) -> TinyFeatures:
    groups = _draw(PRETEXT_SEED_START + seed, images)
    every = np.concatenate([targets for _, targets in groups])
    centre, scale = every.mean(axis=0), every.std(axis=0) + 1e-6
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(integer(seed, Stream.PRETEXT, 0))
        features = TinyFeatures()
        model = nn.Sequential(features, nn.Linear(features.feature_dim, len(GEOMETRY_NAMES)))
    steps = epochs * sum(len(targets) // _BATCH for _, targets in groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_LEARNING_RATE, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        rng = generator(seed, Stream.PRETEXT, 1, epoch)
        losses = []
        for pixels, targets in _batches(groups, rng):
            wanted = torch.from_numpy((targets - centre) / scale)
            optimizer.zero_grad(set_to_none=True)
            loss = F.smooth_l1_loss(model(_to_input(pixels, rng)), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        if on_epoch is not None:
            on_epoch(epoch, float(np.mean(losses)))
    return features.eval()


def _draw(phantom_seed: int, images: int) -> list[Group]:
    """One group of images (n, S, S) uint8 with targets (n, T) float32 for each size; cohorts take turns."""
    cohorts = tuple(COHORTS.values())
    groups = []
    patient = 0
    for size, share in _SIZES:
        pixels: list[NDArray[np.uint8]] = []
        targets: list[NDArray[np.float32]] = []
        while len(pixels) < max(_BATCH, round(images * share)):
            cohort = cohorts[patient % len(cohorts)]
            _, scans = draw_patient(cohort, phantom_seed, 0, patient, _SCANS_PER_PATIENT)
            for number, scan in enumerate(scans):
                pixels.append(draw_scan(scan, cohort, phantom_seed, 0, patient, number, size))
                targets.append(geometry(scan))
            patient += 1
        groups.append((np.stack(pixels), np.stack(targets)))
    return groups


def _batches(groups: list[Group], rng: np.random.Generator) -> list[Group]:
    """Full batches of one size each, sizes in random order."""
    batches = []
    for pixels, targets in groups:
        order = rng.permutation(len(pixels))
        for start in range(0, len(order) - _BATCH + 1, _BATCH):
            chosen = order[start : start + _BATCH]
            batches.append((pixels[chosen], targets[chosen]))
    return [batches[position] for position in rng.permutation(len(batches))]


def _to_input(pixels: NDArray[np.uint8], rng: np.random.Generator) -> Tensor:
    """(B, 3, S, S) float32 as the default transform makes them: mirrored at random, mean and std 0.5."""
    mirrored = rng.random(len(pixels)) < 0.5
    pixels = np.where(mirrored[:, None, None], pixels[:, :, ::-1], pixels)
    scaled = torch.from_numpy(pixels).to(torch.float32).div_(127.5).sub_(1.0)
    return scaled.unsqueeze(1).expand(-1, 3, -1, -1)


def save(features: TinyFeatures, path: Path = PRETEXT_FILE) -> None:
    """Write the state as float16 (counters as they are), which halves the file and costs no accuracy."""
    state = {
        name: tensor.to(torch.float16) if tensor.is_floating_point() else tensor
        for name, tensor in features.state_dict().items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path)


def load_pretext(features: TinyFeatures, path: Path = PRETEXT_FILE) -> None:
    """Put the pretext weights into `features`; every tensor must be there with its shape, and no other."""
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"Cannot read pretext weights from {path}: {error}. Rebuild or reinstall them.") from error
    wanted = {name: tensor.shape for name, tensor in features.state_dict().items()}
    found = {name: tensor.shape for name, tensor in state.items()}
    if wanted != found:
        differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise BadInput(
            f"{path} does not hold the weights of TinyFeatures: {len(differing)} tensors differ, "
            f"first {differing[0]!r}. Use the file that this version of the package wrote."
        )
    features.load_state_dict(state)
