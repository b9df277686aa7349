"""The network that a process trains, under Lightning; built once and reused over clients, rounds and runs."""

from __future__ import annotations

import os
from typing import NamedTuple

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor

from fedsir.clients.lean_adam import adam
from fedsir.clients.module import Batch, Objective
from fedsir.clients.numerics import set_gpu_numerics
from fedsir.clients.objective import CrossEntropy
from fedsir.clients.runtime import RuntimeSetup
from fedsir.config.training import ModelConfig, Precision
from fedsir.models.binding import FlatBinding
from fedsir.models.network import Network, build_network


class ClientModule(lightning.LightningModule):
    """A network with the loss of the task at hand.

    Actors build it once and reuse it for every client, round and run of the same architecture; `objective` is
    set by each task.
    """

    def __init__(self, network: Network, objective: Objective) -> None:
        super().__init__()
        self.network = network
        self.objective = objective

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's signature
        return self.objective(self.network, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The rates here are placeholders: every task sets its own before the first step.
        return adam(self.parameters(), self.device)


class Engine:
    """Module, optimizer and Fabric for one network; any number of runs that train such networks share it.

    What it holds between tasks has no meaning: every task loads weights and resets the optimizer.
    """

    def __init__(self, key: EngineKey) -> None:
        if key.device == "cuda":
            set_gpu_numerics(key.deterministic)
        # Lightning sets it at import, and torch then asks the driver for GPUs anew before every step of an optimizer.
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
        # On a GPU always the first of those that the process sees: an actor's own. LightningEnvironment keeps a client
        # from reading SLURM variables as if it were a rank of a larger job.
        devices = [0] if key.device == "cuda" else 1
        self.fabric = Fabric(
            accelerator=key.device, devices=devices, precision=key.precision, plugins=[LightningEnvironment()]
        )
        self.module = ClientModule(build_network(key.model, key.num_classes), CrossEntropy())
        self.module.to(self.fabric.device)
        self.fabric_module, self.fabric_optimizer = self.fabric.setup(self.module, self.module.configure_optimizers())
        self.binding = FlatBinding(self.module.network)
        if key.compile:
            # In place, so that the names of the tensors stay those of the flat schema.
            self.module.network.backbone.compile()

    @classmethod
    def of(cls, setup: RuntimeSetup) -> Engine:
        """The engine that a run needs."""
        return cls(engine_key(setup))


class EngineKey(NamedTuple):
    """What an engine is made for; runs of equal keys can share one."""

    model: ModelConfig
    num_classes: int
    device: str
    precision: Precision
    deterministic: bool
    compile: bool


def engine_key(setup: RuntimeSetup) -> EngineKey:
    """What the engine of a run is made for."""
    return EngineKey(setup.model, setup.num_classes, setup.device, setup.precision, setup.deterministic, setup.compile)
