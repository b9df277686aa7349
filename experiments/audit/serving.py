"""Client work for federations that an audit deals itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from experiments.config import RunFile
from experiments.session import Session
from fedsir.clients.runtime import set_threads
from fedsir.condition import Condition
from fedsir.data.dataset import Dataset
from fedsir.federation.federation import Federation, FederationFacts, Truth
from fedsir.models.binding import weights_of
from fedsir.models.network import initial_network
from fedsir.server import RunServer, runtime_setup


def dealt(dataset: Dataset, labels: NDArray[np.int64], members: Sequence[NDArray[np.int64]]) -> Federation:
    """A federation whose clients hold the images at `members`, sorted positions, under their `labels` (N,)."""
    return Federation(dataset.class_names, tuple(members), tuple(labels[i] for i in members))


@contextmanager
def serving(session: Session, config: RunFile, dataset: Dataset, federation: Federation) -> Iterator[RunServer]:
    """A server for `federation` with the model, method and seed of `config`; nothing is recorded."""
    weights, schema = weights_of(initial_network(config.model, dataset.num_classes, config.seed))
    # Nobody knows the truth here: what stands for it is never read.
    truth = Truth(federation.observed, np.zeros(federation.num_clients, dtype=np.bool_))
    condition = Condition(dataset, federation, truth, FederationFacts(0, ()), weights, schema)
    set_threads(config.execution.threads)
    with session.executor(config) as (executor, device):
        executor.prepare(runtime_setup(config, condition, device))
        yield RunServer(config, condition, executor)
