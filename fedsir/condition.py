"""One condition and seed, fixed before any method sees it: federation, truth and first weights."""

from __future__ import annotations

from dataclasses import dataclass

from fedsir.config.run import RunConfig
from fedsir.data.dataset import Dataset
from fedsir.federation.build import build_federation
from fedsir.federation.federation import Federation, FederationFacts, Truth
from fedsir.models.binding import weights_of
from fedsir.models.flat import FlatSchema, FlatWeights
from fedsir.models.network import initial_network


@dataclass(frozen=True)
class Condition:
    """What every method of a condition and seed shares; `truth` is for the evaluator alone."""

    dataset: Dataset
    federation: Federation
    truth: Truth
    facts: FederationFacts
    initial_weights: FlatWeights
    schema: FlatSchema


def build_condition(config: RunConfig, dataset: Dataset) -> Condition:
    """Draw the federation and the first weights; depends on everything in `config` except the method.

    Raises BadInput when the partition, the noise or the weights are impossible.
    """
    weights, schema = weights_of(initial_network(config.model, dataset.num_classes, config.seed))
    federation, truth, facts = build_federation(
        dataset.train.labels,
        dataset.train.patients,
        dataset.class_names,
        config.federation,
        config.seed,
        dataset.train.sites,
    )
    return Condition(dataset, federation, truth, facts, weights, schema)
