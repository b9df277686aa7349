"""The round loop of one run: dispatch, evaluation, checkpoint, events."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsir import checkpoint
from fedsir.clients.executor import Executor
from fedsir.clients.runtime import set_threads
from fedsir.condition import Condition
from fedsir.config.run import RunConfig
from fedsir.data.dataset import Dataset
from fedsir.errors import FedsirError, RunFailed, StoreUnreachable, WorkersLost
from fedsir.evaluation.run import Evaluator, Figures
from fedsir.events import (
    TOTALS,
    DatasetFacts,
    Event,
    Recorder,
    RoundFinished,
    RoundRecord,
    RunFinished,
    RunResult,
    RunStarted,
    RunStopped,
)
from fedsir.methods.base import Method, MethodState
from fedsir.methods.registry import find_method
from fedsir.models.flat import FlatWeights
from fedsir.round_ends import Round, RoundEnds
from fedsir.server import Memory, RoundCosts, RunServer, predict_test, runtime_setup, timed

INTERRUPTIONS = (KeyboardInterrupt, SystemExit, WorkersLost, StoreUnreachable, checkpoint.NotWritten)
"""What stops a run from outside; it is recorded as killed rather than as failed."""


@dataclass(frozen=True)
class _Progress:
    """Content of a checkpoint: the method's state after `len(history)` rounds.

    costs: of work that belongs to the round to come, which is what a method does before its first round.
    """

    state: MethodState
    history: tuple[RoundRecord, ...]
    costs: RoundCosts
    seconds: float


def run(
    config: RunConfig,
    condition: Condition,
    executor: Executor,
    recorders: Sequence[Recorder],
    checkpoint_file: Path | None,
    device: str,
    memory: Memory | None = None,
) -> RunResult:
    """Run one condition, method and seed to the last round, continuing from the checkpoint if there is one.

    memory: what runs of this condition and seed share (`Server.once`); empty for the first of them.
    Recorders get their events in order and learn of a failure before it is raised. Raises BadInput before any
    work when the checkpoint cannot be used, RunFailed when a client or the method fails.
    """
    dataset, federation = condition.dataset, condition.federation
    method: Method[Any] = find_method(config.method.name).build(config.method)
    # Files can change behind an unchanged configuration; a state trained on other images must not be continued.
    identity = f"{config.identity()}-{dataset.digest[:16]}"
    owner = checkpoint.Owner(identity, _settings(config, dataset))
    kept = _load_progress(checkpoint_file, owner, method)
    # The server computes in this process; its bits depend on threads as those of clients do.
    set_threads(config.execution.threads)
    executor.prepare(runtime_setup(config, condition, device))
    server = RunServer(config, condition, executor, memory)
    announce = _Announcer(recorders)
    announce(
        RunStarted(
            run_id=config.identity(),
            config=config,
            dataset=dataset_facts(dataset),
            federation=federation,
            truth=condition.truth,
            facts=condition.facts,
            history=kept.history if kept else (),
        )
    )
    try:
        result = _rounds(config, condition, server, method, kept, announce, checkpoint_file, owner)
    except BaseException as error:
        announce.stopped(RunStopped(error, killed=isinstance(error, INTERRUPTIONS)))
        if isinstance(error, (FedsirError, KeyboardInterrupt, SystemExit)):
            raise
        raise RunFailed(f"run {config.name} ({config.method.label}, seed {config.seed}): {error!r}") from error
    announce(RunFinished(result))
    if checkpoint_file is not None:
        checkpoint.remove(checkpoint_file)
    return result


def _rounds(
    config: RunConfig,
    condition: Condition,
    server: RunServer,
    method: Method[Any],
    kept: _Progress | None,
    announce: _Announcer,
    checkpoint_file: Path | None,
    owner: checkpoint.Owner,
) -> RunResult:
    evaluator = Evaluator(config, condition.dataset, condition.federation, condition.truth)
    begin = time.perf_counter()
    earlier = kept.seconds if kept else 0.0
    history = list(kept.history) if kept else []
    state = kept.state if kept else None
    if kept is not None:
        server.costs = kept.costs

    # Of the records in `history`: a checkpoint has all of them, and each is encoded once.
    texts: list[str] = []

    def keep(state: MethodState, costs: RoundCosts) -> None:
        if checkpoint_file is not None:
            texts.extend(map(checkpoint.text_of, history[len(texts) :]))
            spent = earlier + time.perf_counter() - begin
            content = {"state": state, "history": checkpoint.Texts(texts), "costs": costs, "seconds": spent}
            checkpoint.save(checkpoint_file, owner, content)

    def evaluate(state: MethodState) -> Figures:
        return evaluator.evaluate(state, predict_test(server, state, len(condition.dataset.test)))

    def finish(ended: Round, figures: Figures) -> None:
        record = _record(ended.number + 1, figures.metrics, ended.costs)
        history.append(record)
        keep(ended.state, RoundCosts())
        announce(RoundFinished(record, config.training.rounds))

    if state is None:
        state = timed(server, partial(method.begin, server))
        keep(state, server.costs)
    figures = None
    with RoundEnds(evaluate, finish, overlap=server.slots > 1) as ends:
        for t in range(len(history), config.training.rounds):
            state = timed(server, partial(method.round, server, state, t))
            if (before := ends.wait()) is not None:
                # Known only after the fact, so it counts for this round.
                server.costs.seconds["record"] = before.record
            costs, server.costs = server.costs, RoundCosts()
            ends.begin(Round(t, state, costs))
        if (last := ends.wait()) is not None:
            figures = last.figures
    if figures is None:
        # Stopped after the last round's checkpoint, before the end was recorded.
        figures = evaluate(state)
    return RunResult(
        config=config,
        totals={key: sum(record.metrics[key] for record in history) for key in TOTALS},
        final={**history[-1].metrics, **evaluator.final(figures)},
        confusion=figures.confusion,
        test_labels=np.asarray(condition.dataset.test.labels, dtype=np.int64),
        predicted=figures.predicted,
        labels=state.labels,
        predicted_noisy=None if state.identification is None else ~state.identification.clean,
        identification=state.identification,
        identification_figures=figures.identification,
        label_history=state.label_history,
        margins=None if state.evidence is None else state.evidence.margins,
        agreement=None if state.evidence is None else state.evidence.agreement,
        references=None if state.evidence is None else state.evidence.references,
        weights=state.weights if state.client_models is None else None,
        schema=server.schema,
        weights_hash=weights_hash(*(state.client_models or (state.weights,))),
        seconds=earlier + time.perf_counter() - begin,
    )


def _record(round_: int, metrics: Mapping[str, float], costs: RoundCosts) -> RoundRecord:
    values = dict(metrics)
    if costs.loss is not None:
        values["train/loss"] = costs.loss
    values["bytes/up"], values["bytes/down"] = float(costs.bytes_up), float(costs.bytes_down)
    values["cost/client_epochs"], values["cost/forward_units"] = costs.client_epochs, costs.forward_units
    values.update({f"seconds/{part}": spent for part, spent in costs.seconds.items()})
    return RoundRecord(round_, values, costs.notes)


class _Announcer:
    """Hands events to all recorders."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = recorders

    def __call__(self, event: Event) -> None:
        for recorder in self._recorders:
            recorder.record(event)

    def stopped(self, event: RunStopped) -> None:
        """Tell every recorder, also after one that fails again: what stopped the run is what the user must see."""
        for recorder in self._recorders:
            try:
                recorder.record(event)
            except Exception as again:
                event.error.add_note(f"{type(recorder).__name__} could not record the end of the run: {again}")


def _load_progress(file: Path | None, owner: checkpoint.Owner, method: Method[Any]) -> _Progress | None:
    if file is None:
        return None
    hints = {"state": method.state_type, "history": tuple[RoundRecord, ...], "costs": RoundCosts, "seconds": float}
    found = checkpoint.resume(file, owner, hints)
    if found is None:
        return None
    content, remark = found
    kept = _Progress(**content)
    if remark is not None:
        # Said with the round to come, as everything that a round has to say.
        kept.costs.notes += (remark,)
    return kept


def _settings(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """What a checkpoint says about its run, without where that is recorded."""
    values = config.model_dump(mode="json", include=set(RunConfig.model_fields) - {"name"})
    return {**values, "images": dataset.digest[:16]}


def dataset_facts(dataset: Dataset) -> DatasetFacts:
    """What a record says about the images."""
    return DatasetFacts(
        name=dataset.name,
        kind=dataset.kind,
        digest=dataset.digest,
        class_names=dataset.class_names,
        train_images=len(dataset.train),
        test_images=len(dataset.test),
        train_patients=len(np.unique(dataset.train.patients)),
        test_patients=len(np.unique(dataset.test.patients)),
        notes=dataset.notes,
    )


def weights_hash(*models: FlatWeights) -> str:
    """Hex SHA-256 of one state or several in order; equal exactly when every bit is."""
    digest = hashlib.sha256()
    for weights in models:
        digest.update(weights.values.tobytes() + weights.counters.tobytes())
    return digest.hexdigest()
