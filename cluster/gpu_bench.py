"""Images per second of a Kermany-sized federation at several GPU fractions, beside a bare loop, in one call.

    python -m cluster.gpu_bench                             # one machine with GPUs; minutes
    python -m cluster.gpu_bench --device cpu --clients 4 --train-images 400 --pixels 32 --fractions 1,0.5   # dry run

The images are random grey values of the number and size of the release, so nothing has to be there but this package.
On CPUs a fraction f stands for 1/f actors, so that everything can be gone through without a GPU; its figures say
nothing about GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.table import Table

from cluster.gpu_watch import GpuWatch, actor_megabytes
from experiments.console import new_console, say
from experiments.sweeps.images import PUBLISHED
from fedsir import coordinator
from fedsir.clients.numerics import set_gpu_numerics
from fedsir.clients.pool import ActorPool
from fedsir.condition import Condition, build_condition
from fedsir.config.run import RunConfig
from fedsir.data.dataset import Dataset, ImageSet
from fedsir.data.kermany import CLASSES
from fedsir.errors import BadInput, FedsirError
from fedsir.events import Event, RoundFinished
from fedsir.models.network import build_network

TRAIN_IMAGES, TEST_IMAGES = PUBLISHED["kermany"]
IMAGES_PER_PATIENT = 20


@dataclass(frozen=True)
class Size:
    """What is trained. rounds: timed ones, after one that warms up."""

    device: str
    clients: int
    train_images: int
    test_images: int
    pixels: int
    backbone: str
    batch: int
    rounds: int
    deterministic: bool

    def config(self, **execution: Any) -> RunConfig:
        """FedAvg, one local epoch a round, on the federation that all measurements share."""
        return RunConfig.model_validate(
            {
                "name": "gpu-bench",
                # Describes the images that `random_images` draws; none is rendered.
                "data": {
                    "source": "phantom",
                    "image_size": self.pixels,
                    "train_images": self.train_images,
                    "test_images": self.test_images,
                },
                "federation": {"clients": self.clients, "clean_clients": max(1, self.clients // 10)},
                "model": {"backbone": self.backbone, "weights": "random"},
                "training": {"rounds": self.rounds + 1, "batch_size": self.batch},
                "evaluation": {"bootstrap_samples": 1},
                "method": "fedavg",
                "execution": {"device": self.device, "deterministic": self.deterministic, **execution},
            }
        )


@dataclass
class Clock:
    """Recorder that notes when rounds end; `warm` is called after the first, in which everything starts."""

    warm: Callable[[], None]
    ends: list[float] = field(default_factory=list)

    def record(self, event: Event) -> None:
        if isinstance(event, RoundFinished):
            if not self.ends:
                self.warm()
            self.ends.append(time.perf_counter())


@dataclass(frozen=True)
class Measured:
    """One fraction. utilisation: per cent, None without GPUs. megabytes: of one actor, None where nobody tells."""

    fraction: float
    actors: int
    images_per_second: float
    utilisation: float | None
    megabytes: float | None
    weights_hash: str


def random_images(size: Size) -> Dataset:
    """Random grey values in the shapes that images have after loading."""
    rng = np.random.default_rng(0)

    def split(images: int, first_patient: int) -> ImageSet:
        labels = rng.integers(0, len(CLASSES), images, dtype=np.int64)
        patients = first_patient + np.arange(images, dtype=np.int64) // IMAGES_PER_PATIENT
        pixels = rng.integers(0, 256, (images, size.pixels, size.pixels), dtype=np.uint8)
        return ImageSet(pixels, labels, patients, tuple(f"random-{i}" for i in range(images)))

    train = split(size.train_images, 0)
    return Dataset("random", "phantom", CLASSES, train, split(size.test_images, size.train_images), "0" * 64)


def measure(size: Size, condition: Condition, fraction: float) -> Measured:
    """Train at one fraction and look on. Raises BadInput where actors do not fit, RunFailed where work fails."""
    execution: dict[str, Any] = (
        {"actors": max(1, round(1 / fraction))} if size.device == "cpu" else {"gpus_per_client": fraction}
    )
    config = size.config(**execution)
    pool = ActorPool(config.execution, size.clients)
    try:
        watch = GpuWatch(enabled=size.device == "cuda")
        clock = Clock(watch.forget)
        lane = pool.lane()
        with watch:
            result = coordinator.run(config, condition, lane, [clock], None, pool.device)
            megabytes = actor_megabytes(pool.pids(), size.device)
        seconds = clock.ends[-1] - clock.ends[0]
        rate = size.rounds * sum(condition.federation.sizes) / seconds
        return Measured(fraction, pool.slots, float(rate), watch.utilisation(), megabytes, result.weights_hash)
    finally:
        pool.close()


def bare_rate(size: Size, condition: Condition) -> float:
    """Images per second of the same training in one process without Ray, Lightning and server.

    In a process of its own, so that none of its memory stays on the GPU.
    """
    indices = [np.asarray(i) for i in condition.federation.indices]
    labels = [np.asarray(y) for y in condition.federation.observed]
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_bare, args=(size, indices, labels, there))
    process.start()
    there.close()
    try:
        return float(here.recv())
    except EOFError as error:
        raise FedsirError("the bare loop has died; see its traceback above") from error
    finally:
        process.join()


def _bare(size: Size, indices: list[Any], labels: list[Any], answer: Any) -> None:
    device = torch.device(size.device)
    if size.device == "cuda":
        set_gpu_numerics(size.deterministic)
    else:
        torch.set_num_threads(1)
    images = torch.from_numpy(random_images(size).train.images).to(device)
    network = build_network(size.config().model, len(CLASSES)).to(device).to(memory_format=torch.channels_last)
    first = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    total, rng = sum(len(i) for i in indices), np.random.default_rng(0)
    begin = 0.0
    for round_ in range(size.rounds + 1):
        if round_ == 1:
            begin = _now(device)
        mean = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in first.items()}
        for own, observed in zip(indices, labels, strict=True):
            network.load_state_dict(first)
            network.train()
            optimizer = torch.optim.Adam(network.parameters(), lr=3e-4, weight_decay=5e-4, fused=True)
            order = rng.permutation(len(own))
            positions = torch.from_numpy(own[order]).to(device)
            targets = torch.from_numpy(observed[order].astype(np.int64)).to(device)
            flips = torch.from_numpy(rng.random(len(own)) < 0.5).to(device)
            for start in range(0, len(own), size.batch):
                part = slice(start, start + size.batch)
                batch = images[positions[part]]
                batch = torch.where(flips[part].view(-1, 1, 1), batch.flip(-1), batch)
                batch = batch.unsqueeze(1).float().div_(255).sub_(0.5).div_(0.5).expand(-1, 3, -1, -1)
                logits = network(batch.contiguous(memory_format=torch.channels_last))
                loss = F.cross_entropy(logits, targets[part])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for name, tensor in network.state_dict().items():
                mean[name] += tensor.double() * (len(own) / total)
        first = {name: tensor.to(first[name].dtype) for name, tensor in mean.items()}
    answer.send(size.rounds * total / (_now(device) - begin))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def parse_fractions(text: str) -> list[float]:
    """(1.0, 0.25) from `1,0.25`. Raises BadInput."""
    try:
        fractions = [float(part) for part in text.split(",")]
    except ValueError:
        fractions = []
    if not fractions or not all(0 < f <= 1 for f in fractions):
        raise BadInput(f"--fractions {text}: expected shares of a GPU, for example 1,0.5,0.25,0.1.")
    return fractions


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    fractions: Annotated[str, typer.Option(help="Shares of a GPU that a client gets.")] = "1,0.5,0.25,0.1",
    clients: Annotated[int, typer.Option(min=2)] = 30,
    train_images: Annotated[int, typer.Option(min=100)] = TRAIN_IMAGES,
    test_images: Annotated[int, typer.Option(min=1)] = TEST_IMAGES,
    pixels: Annotated[int, typer.Option(min=16)] = 128,
    backbone: Annotated[str, typer.Option(help="squeezenet1_1, shufflenet_v2_x1_0, regnet_y_400mf or tiny.")] = (
        "squeezenet1_1"
    ),
    batch: Annotated[int, typer.Option(min=2)] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each measurement.")] = 3,
    fast: Annotated[bool, typer.Option("--fast", help="TF32 and the fastest algorithms; bits are not compared.")] = (
        False
    ),
) -> None:
    """Print images/s, GPU utilisation and memory per actor at each fraction, and whether bits repeat.

    Exit code 1 where two runs of the first fraction, or runs of different fractions, give different weights.
    """
    size = Size(device, clients, train_images, test_images, pixels, backbone, batch, rounds, not fast)
    wanted = parse_fractions(fractions)
    if device not in ("cuda", "cpu") or (device == "cuda" and not torch.cuda.is_available()):
        raise BadInput(
            f"--device {device}: torch sees no such device here.\nSee fedsir doctor; --device cpu for a dry run."
        )
    console = new_console()
    condition = build_condition(size.config(), random_images(size))
    say(console, f"{clients} clients, {train_images} random images of {pixels} px, {backbone}, batches of {batch}")
    with _own_ray():
        measured = [measure(size, condition, fraction) for fraction in wanted]
        again = measure(size, condition, wanted[0])
    console.print(_table(measured, bare_rate(size, condition)))
    if fast:
        return
    repeated, anywhere = again.weights_hash == measured[0].weights_hash, len({m.weights_hash for m in measured}) == 1
    say(console, f"two runs, the same bits: {'yes' if repeated else 'NO'} ({measured[0].weights_hash[:16]})")
    say(console, f"all fractions, the same bits: {'yes' if anywhere else 'NO'}")
    if not (repeated and anywhere):
        raise typer.Exit(1)


def _table(measured: list[Measured], bare: float) -> Table:
    table = Table(title="training and evaluation, mean of the timed rounds")
    for column in ("fraction", "actors", "images/s", "of the bare loop", "GPU busy", "memory per actor"):
        table.add_column(column, justify="right")
    table.add_row("bare loop", "1 process", f"{bare:.0f}", "1.00", "", "")
    for m in measured:
        busy = "–" if m.utilisation is None else f"{m.utilisation:.0f} %"
        memory = "–" if m.megabytes is None else f"{m.megabytes:.0f} MB"
        rate = f"{m.images_per_second:.0f}"
        table.add_row(f"{m.fraction:g}", str(m.actors), rate, f"{m.images_per_second / bare:.2f}", busy, memory)
    return table


@contextmanager
def _own_ray() -> Iterator[None]:
    import ray

    try:
        yield
    finally:
        ray.shutdown()


if __name__ == "__main__":
    try:
        typer.run(main)
    except FedsirError as problem:
        raise SystemExit(f"gpu_bench: {problem}") from problem
