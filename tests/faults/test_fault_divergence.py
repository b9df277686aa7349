"""A client whose training diverges, under every method: it is left out, the record says so, the others go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fedsir_with_faults import Diverging
from torch import Tensor

from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.methods.registry import BUILT_IN

ROUNDS = 4
FROM_ROUND = 1
POOL = 16
# What brings every stage of a method into so few rounds.
SETTINGS: dict[str, dict[str, Any]] = {
    "fedcorr": {"stages": {"preprocessing": 0.5, "finetuning": 0.25, "usual": 0.25}},
    "fedned": {"lambda_rel": 1.0, "nd": {"enabled": True, "steps": 2}},
    "fedsir": {"stage_one": {"epochs": 1}, "relabeling": {"every": 2}},
    "spectral_pruning": {"stage_one": {"epochs": 1}},
    "oct_fedsir": {"stage_one": {"epochs": 1}, "relabeling": {"every": 2}},
}
VARIANTS = [*BUILT_IN, "rhfl/averaged", "rhfl/hybrid"]
# Tasks that train a model of a client. In others `client` may be the number of a shard, and no client is meant.
TRAINING = {
    *("LocalTraining", "ProximalTraining", "RoFLTraining", "TwoViewTraining", "MixupTraining", "TrainAndMeasure"),
    *("TrainTwice", "LearnLabels", "PrivateTraining", "AveragedTraining", "StageOne"),
}


class NoLoss:
    """A module whose losses are no numbers."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def training_step(self, *arguments: Any) -> Tensor:
        return self._module.training_step(*arguments) * float("nan")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Lossless:
    """A client whose training has no step with a loss that is a number."""

    inner: Any

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[Any]:
        module = client.runtime.fabric_module
        client.runtime.fabric_module = NoLoss(module)
        try:
            return self.inner(client, broadcast)  # type: ignore[no-any-return]
        finally:
            client.runtime.fabric_module = module


def struck(kind: type[Any], clients: set[int], asked: list[tuple[int, int]]) -> Callable[[list[Any]], list[Any]]:
    """Lets the training of `clients` go wrong from a round on; `asked` gets client and round of each."""

    def change(items: list[Any]) -> list[Any]:
        if type(items[0].task).__name__ not in TRAINING:
            return items
        hit = [i for i in items if i.client in clients and i.round >= FROM_ROUND]
        asked.extend((i.client, i.round) for i in hit)
        return [replace(i, task=kind(i.task)) if i in hit else i for i in items]

    return change


def config_of(lab: Any, name: str) -> Any:
    method, _, preset = name.partition("/")
    settings = {"name": method, **SETTINGS.get(method, {}), **({"preset": preset} if preset else {})}
    return lab.config(settings, training={"rounds": ROUNDS}, federation={"public_pool": POOL})


@pytest.mark.parametrize("kind", [Diverging, Lossless])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_client_that_diverges_is_left_out_and_named(lab: Any, name: str, kind: type[Any]) -> None:
    config, asked, recorder = config_of(lab, name), list[tuple[int, int]](), lab.collector()
    # A clean client, so that no method keeps it out anyway.
    victim = int(np.flatnonzero(~lab.condition(config).truth.noisy)[0])
    executor = lab.dispatching(lab.executor, change=struck(kind, {victim}, asked))
    result = lab.run(config, executor=executor, recorder=recorder)
    assert asked
    models = [result.weights] if result.weights is not None else []
    assert all(np.isfinite(model.values).all() for model in models)
    assert np.isfinite([value for key, value in result.final.items() if key.startswith("final/")]).all()
    assert all(np.isfinite(record.metrics["test/loss"]) for record in recorder.rounds)
    for _, round_ in asked:
        # Stage I has a number of its own and is told with the first round, as that nothing could be compared.
        notes = "\n".join(recorder.rounds[round_ if round_ < ROUNDS else 0].notes)
        assert re.search(
            rf"client {victim} .*non-finite|non-finite.*client {victim}\b|usable classes \(.*\b{victim}\b", notes
        ), notes
    # The others go on learning.
    assert len({record.metrics["test/loss"] for record in recorder.rounds}) == ROUNDS


@pytest.mark.parametrize("kind", [Diverging, Lossless])
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedlsr", "rofl", "fednoro", "fedelc", "fedned", "oct_fedsir"])
def test_where_nobody_trains_any_more_the_model_stays_and_the_record_says_so(
    lab: Any, name: str, kind: type[Any]
) -> None:
    config, recorder = config_of(lab, name), lab.collector()
    executor = lab.dispatching(lab.executor, change=struck(kind, set(range(lab.clients)), []))
    result = lab.run(config, executor=executor, recorder=recorder)
    assert np.isfinite(result.weights.values).all()
    assert len({record.metrics["test/loss"] for record in recorder.rounds[FROM_ROUND - 1 :]}) == 1
    for record in recorder.rounds[FROM_ROUND:]:
        assert "no client returned a usable update; the global model stays as it was" in record.notes
