"""What the floor shall do: the steps that the clients of a federated run take, in its order and with its flips."""

from __future__ import annotations

import numpy as np

from experiments.bench.floor import Plan, Step
from experiments.config import RunFile
from fedsir.clients.training import batch_slices
from fedsir.condition import Condition
from fedsir.data.transforms import draw_flips
from fedsir.errors import BadInput
from fedsir.seeding import Stream, generator


def floor_plan(config: RunFile, condition: Condition) -> Plan:
    """The plan of a FedAvg run. Raises BadInput for settings that the bare loop has no equivalent of."""
    transform, training = config.data.transform, config.training
    if not isinstance(transform.mean, float) or not isinstance(transform.std, float) or config.model.dropout:
        raise BadInput("the floor has neither dropout nor separate statistics of the channels; leave both out.")
    if training.participation < 1.0:
        raise BadInput("the floor trains every client in every round; leave training.participation out.")
    clients, rounds = range(condition.federation.num_clients), range(training.rounds)
    return Plan(
        model=config.model,
        num_classes=condition.dataset.num_classes,
        lr=training.optimizer.lr,
        weight_decay=training.optimizer.weight_decay,
        mean=transform.mean,
        std=transform.std,
        images=condition.dataset.train.images,
        test_images=condition.dataset.test.images,
        steps=tuple(tuple(client_steps(config, condition, k, t) for k in clients) for t in rounds),
        sizes=tuple(condition.federation.sizes.tolist()),
        values=condition.initial_weights.values,
        counters=condition.initial_weights.counters,
    )


def client_steps(config: RunFile, condition: Condition, client: int, round_: int) -> tuple[Step, ...]:
    """The steps of one client in one round: shuffling and flips from the stream that local training uses."""
    indices, labels = condition.federation.indices[client], condition.federation.observed[client]
    rng = generator(config.seed, Stream.BATCHES, client, round_)
    size, found = len(indices), []
    for _ in range(config.training.local_epochs):
        order = rng.permutation(size)
        flips = draw_flips(size, rng) if config.data.transform.horizontal_flip else np.zeros(size, dtype=np.bool_)
        for part in batch_slices(size, config.training.batch_size):
            chosen = order[part]
            found.append(Step(indices[chosen], flips[chosen], labels[chosen]))
    return tuple(found)


def count_steps(plan: Plan) -> int:
    """Optimisation steps of all clients and rounds."""
    return sum(len(steps) for clients in plan.steps for steps in clients)
