"""The network that a process trains, under Lightning; built once and reused over clients, rounds and runs."""

from __future__ import annotations

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor

from fedsir.clients.module import Batch, Objective
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
        return torch.optim.Adam(self.parameters(), lr=1.0, fused=True)


class Engine:
    """Module, optimizer and Fabric for one network; any number of runs that train such networks share it.

    What it holds between tasks has no meaning: every task loads weights and resets the optimizer.
    """

    def __init__(self, model: ModelConfig, num_classes: int, device: str, precision: Precision) -> None:
        # LightningEnvironment keeps a client from reading SLURM variables as if it were a rank of a larger job.
        self.fabric = Fabric(accelerator=device, devices=1, precision=precision, plugins=[LightningEnvironment()])
        self.module = ClientModule(build_network(model, num_classes), CrossEntropy())
        self.fabric_module, self.fabric_optimizer = self.fabric.setup(self.module, self.module.configure_optimizers())
        self.binding = FlatBinding(self.module.network)

    @classmethod
    def of(cls, setup: RuntimeSetup) -> Engine:
        """The engine that a run needs."""
        return cls(setup.model, setup.num_classes, setup.device, setup.precision)


def engine_key(setup: RuntimeSetup) -> tuple[ModelConfig, int, str, Precision]:
    """Runs of equal keys can share an engine."""
    return setup.model, setup.num_classes, setup.device, setup.precision
