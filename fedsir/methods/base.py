"""What a method is: two functions over a state that is also the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsir.clients.tasks import ClientResult, ClientTask
from fedsir.config.training import TrainingConfig
from fedsir.federation.federation import Federation
from fedsir.federation.labels import LabelCheckpoint
from fedsir.models.flat import FlatSchema, FlatWeights
from fedsir.spectral.identification import Identification
from fedsir.spectral.relabeling import RelabelingEvidence

U = TypeVar("U")
V = TypeVar("V")


@dataclass(frozen=True)
class MethodState:
    """Base of every method's state.

    weights: the global model that is evaluated. labels: per client the current training labels (n_k,) int64, or
    None while the method has changed none; label_history: every change of them, see `relabeled`.
    identification: the verdict on clients, or None. client_models: where a method has no global model, the
    models that are evaluated instead of `weights`. evidence: what decided the last relabelling, or None.
    Subclasses add fields; everything must be arrays, numbers, strings or dataclasses of these, since the state
    is written to the checkpoint as it is.
    """

    weights: FlatWeights
    labels: tuple[NDArray[np.int64], ...] | None = None
    identification: Identification | None = None
    label_history: tuple[LabelCheckpoint, ...] = ()
    client_models: tuple[FlatWeights, ...] | None = None
    evidence: RelabelingEvidence | None = None

    def relabeled(self, t: int, labels: tuple[NDArray[np.int64], ...]) -> Self:
        """The state with new training labels that hold from round t on."""
        entry = LabelCheckpoint(t, tuple(y.astype(np.int16) for y in labels))
        return replace(self, labels=labels, label_history=(*self.label_history, entry))


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

    def fold_clients(
        self,
        tasks: Mapping[int, ClientTask[U]],
        round_: int,
        broadcast: Mapping[str, Any],
        take: Callable[[int, ClientResult[U]], V],
    ) -> dict[int, V]:
        """Run one task per client as `run_clients` does, and keep `take(client, result)` instead of each result.

        It is called in client order while others still work. What it does not return is let go of, so that the models
        of many clients never are in memory together.
        """
        ...

    def spread(self, tasks: Sequence[ClientTask[U]], round_: int, broadcast: Mapping[str, Any]) -> list[U]:
        """Run server-side work on the workers, one task each; `client.id` is the position and no client is meant."""
        ...

    def once(self, key: str, work: Callable[[], V]) -> V:
        """Result of `work`, shared by the runs of one condition and seed whose `key` is the same.

        The key must name every setting of the method that the result depends on; its first word is for people.
        Later runs get the cost booked as well, so that of a run's figures only its wall time depends on who was first.
        """
        ...

    def note(self, message: str) -> None:
        """Tell the user something about this round (a client left out, a guard that acted)."""
        ...


S = TypeVar("S", bound=MethodState)


class Method(Protocol, Generic[S]):
    """A training method. Instances hold settings only; everything that changes is in the state.

    Arrays of a state, and those that were sent to clients, are never changed in place: a state is evaluated and saved
    while the next round is under way, and values that are sent again are not read again.
    """

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
