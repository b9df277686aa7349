"""How many actors fit on one GPU: one is started there, does what a client does, and its memory is looked at."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from fedsir.clients.executor import Worker, WorkItem
from fedsir.clients.numerics import gpu_options
from fedsir.clients.objective import CrossEntropy
from fedsir.clients.placement import Layout, Placement
from fedsir.clients.runtime import RuntimeSetup
from fedsir.clients.sizing import Node
from fedsir.clients.tasks import LocalTraining, PredictTest
from fedsir.clients.training import FORWARD_BATCH, Recipe
from fedsir.config.data import TransformConfig
from fedsir.config.training import ExecutionConfig, ModelConfig, OptimizerConfig
from fedsir.errors import BadInput, first_line

if TYPE_CHECKING:
    from fedsir.config.run import RunConfig
    from fedsir.data.dataset import Dataset

USABLE_SHARE = 0.9
"""Share of the free memory of a GPU that actors are planned into; the rest is for methods that take more."""

GIB = 2**30


@dataclass(frozen=True)
class Demand:
    """What clients ask of a GPU.

    batch_size: images per step. image_bytes: of the uint8 images that an actor keeps on the GPU, at most those of all
    clients.
    """

    model: ModelConfig
    num_classes: int
    image_size: int
    batch_size: int
    image_bytes: int
    execution: ExecutionConfig

    @classmethod
    def of(cls, config: RunConfig, dataset: Dataset) -> Demand:
        """The demand of a run."""
        return cls(
            model=config.model,
            num_classes=dataset.num_classes,
            image_size=config.data.image_size,
            batch_size=config.training.batch_size,
            image_bytes=int(dataset.train.images.nbytes),
            execution=config.execution,
        )


@dataclass(frozen=True)
class Measured:
    """Bytes that are free on one GPU, and bytes that one actor takes of it, its CUDA context included."""

    free: int
    per_actor: int

    def actors_per_gpu(self) -> int:
        """How many actors fit. Raises BadInput when not even one does."""
        fit = int(USABLE_SHARE * self.free) // max(1, self.per_actor)
        if fit < 1:
            raise BadInput(
                f"execution.gpus_per_client is auto, but one client takes {self.per_actor / GIB:.1f} GiB of the GPU, "
                f"of which {self.free / GIB:.1f} GiB are free.\n"
                "Lower training.batch_size or data.image_size, or free memory of the GPU."
            )
        return fit


class ProbeActor(Worker):
    """Looks at the memory of its GPU, or does what a client does."""

    def free(self) -> int:
        """Bytes that are free on the GPU."""
        return int(torch.cuda.mem_get_info(0)[0])

    def act(self, demand: Demand, device: str) -> int:
        """Train one client for two steps and predict with its model; everything stays allocated. Returns the steps."""
        images = 2 * (demand.batch_size + 1)
        # The content of the images has no part in what they take.
        pixels = np.zeros((images, demand.image_size, demand.image_size), dtype=np.uint8)
        setup = RuntimeSetup(
            model=demand.model,
            num_classes=demand.num_classes,
            transform=TransformConfig(),
            train_images=pixels,
            test_images=np.zeros((FORWARD_BATCH, *pixels.shape[1:]), dtype=np.uint8),
            indices=(np.arange(images),),
            public_pool=np.arange(0),
            seed=0,
            threads=demand.execution.threads,
            device=device,
            precision=demand.execution.precision,
            deterministic=demand.execution.deterministic,
            compile=demand.execution.compile,
        )
        self.prepare(setup)
        weights = self.runtime().binding.read()
        recipe = Recipe(CrossEntropy(), 1, demand.batch_size + 1, OptimizerConfig())
        training = WorkItem(0, 0, LocalTraining(np.zeros(images, dtype=np.int64), recipe), 1)
        outcomes = self.work([training, WorkItem(0, 0, PredictTest(0, FORWARD_BATCH), 1)], {"weights": weights})
        update: Any = outcomes[0].result.update
        return int(update.steps)


def measure(demand: Demand, nodes: list[Node], timeout_s: float) -> Measured:
    """What an actor takes on a GPU of `nodes`, by two short-lived actors: one acts while the other looks.

    So whatever CUDA takes beside torch's own memory counts as well. Raises BadInput when Ray cannot start them within
    `timeout_s`, or the GPU cannot be used.
    """
    node = next(node for node in nodes if node.gpus >= 1)
    cpus = min(1.0, node.cpus) / 2
    layout = Layout(cpus=cpus, gpus=0.5, homes=(0, 0), bundles=({"GPU": 1.0, "CPU": 2 * cpus},))
    begin = time.monotonic()
    placement = Placement(layout, nodes, timeout_s)
    options = gpu_options(demand.execution.deterministic)
    remote: Any = ray.remote(ProbeActor)
    actors = [remote.options(**options, **placement.options(slot)).remote() for slot in (0, 1)]
    looking, acting = actors
    try:

        def answer(reference: Any) -> int:
            return int(ray.get(reference, timeout=max(1.0, begin + timeout_s - time.monotonic())))

        before = answer(looking.free.remote())
        answer(acting.act.remote(demand, "cuda"))
        after = answer(looking.free.remote())
    except GetTimeoutError as error:
        raise BadInput(placement.shortage(timeout_s)) from error
    except RayError as error:
        raise BadInput(
            f"execution.gpus_per_client is auto, but the measurement of GPU memory failed: {first_line(error)}\n"
            "Give a fraction instead, or see `fedsir doctor`."
        ) from error
    finally:
        for actor in actors:
            ray.kill(actor)
        placement.close()
    return Measured(free=before, per_actor=before - after + demand.image_bytes)
