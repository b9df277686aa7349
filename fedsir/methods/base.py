"""What a method is: two functions over a state that is also the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsir.clients.tasks import ClientResult, ClientTask
from fedsir.config.training import TrainingConfig
from fedsir.federation.federation import Federation
from fedsir.models.flat import FlatSchema, FlatWeights
from fedsir.spectral.identification import Identification

U = TypeVar("U")


@dataclass(frozen=True)
class MethodState:
    """Base of every method's state.

    weights: the global model that is evaluated. labels: per client the current training labels (n_k,) int64, or
    None while the method has changed none. identification: the verdict on clients, or None.
    Subclasses add fields; everything must be arrays, numbers, strings or dataclasses of these, since the state
    is written to the checkpoint as it is.
    """

    weights: FlatWeights
    labels: tuple[NDArray[np.int64], ...] | None = None
    identification: Identification | None = None


class Server(Protocol):
    """What the coordinator offers to a method. There is no way to true labels, files or recorders."""

    @property
    def federation(self) -> Federation:
        """Who holds which image under which observed label."""
        ...

    @property
    def training(self) -> TrainingConfig:
        """Budget and optimizer of the main stage."""
        ...

    @property
    def schema(self) -> FlatSchema:
        """Names and places of the tensors inside flat weights."""
        ...

    @property
    def initial_weights(self) -> FlatWeights:
        """The state every method of the condition starts from."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the run, for `fedsir.seeding`."""
        ...

    def run_clients(
        self, tasks: Mapping[int, ClientTask[U]], round_: int, broadcast: Mapping[str, Any]
    ) -> dict[int, ClientResult[U]]:
        """Run one task per client in parallel; results come in client order."""
        ...

    def note(self, message: str) -> None:
        """Tell the user something about this round (a client left out, a guard that acted)."""
        ...


S = TypeVar("S", bound=MethodState)


class Method(Protocol, Generic[S]):
    """A training method. Instances hold settings only; everything that changes is in the state."""

    @property
    def state_type(self) -> type[S]:
        """Class of the state, to restore it from a checkpoint."""
        ...

    def begin(self, server: Server) -> S:
        """Everything before the first round (for example identification)."""
        ...

    def round(self, server: Server, state: S, t: int) -> S:
        """Communication round t = 0 .. rounds - 1."""
        ...
