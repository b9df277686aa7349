"""Finding a recorded run and reading its explanation back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from fedsir.errors import BadInput
from fedsir.events import RoundFinished, RoundRecord, RunFinished, RunStopped
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.explanation import RunFacts, find_run, read_explanation
from mlflow_tracking.recorder import MlflowRecorder
from mlflow_tracking.store import Store, existing_store, prepare_store


@pytest.fixture(scope="module")
def book(store: Store) -> Store:
    """An experiment of its own in the session's store."""
    return prepare_store(TrackingConfig(uri=store.uri, experiment="explanations"))


@pytest.fixture(scope="module")
def recorded(book: Store, synthetic: Any) -> Callable[..., RunFacts]:
    """Record a run with the named ending; its facts as the store has them."""

    def record(
        name: str,
        identity: str | None = None,
        ending: str = "finished",
        changes: Any = None,
        figures: bool = False,
        **kind: bool,
    ) -> RunFacts:
        config = synthetic.config()
        started = synthetic.started(config.model_copy(update={"name": name}), identity)
        recorder = MlflowRecorder(book, TrackingConfig(figures=figures))
        recorder.record(started)
        mlflow_id = recorder.mlflow_run_id
        assert mlflow_id is not None
        recorder.record(RoundFinished(RoundRecord(1, {}, ("client 3 was left out",)), total_rounds=2))
        if ending == "failed":
            recorder.record(RunStopped(ValueError("client 3 broke"), killed=False))
        elif ending == "finished":
            recorder.record(RunFinished(replace(synthetic.result(started, **kind), **(changes or {}))))
        return find_run(book, mlflow_id)

    return record


@pytest.fixture(scope="module")
def run(recorded: Callable[..., RunFacts]) -> RunFacts:
    return recorded("unit")


@pytest.fixture(params=["tables", "search"])
def seen(book: Store, request: pytest.FixtureRequest) -> Store:
    """`book` as names are looked up in a SQLite file, and as they are on a server."""
    return book if request.param == "tables" else replace(book, uri="http://elsewhere:5000")


def test_a_run_is_found_by_each_of_its_names(seen: Store, run: RunFacts) -> None:
    assert (run.name, run.status, run.method) == ("unit-spectral-s0", "FINISHED", "spectral")
    for wanted in (run.mlflow_id, run.mlflow_id[:12], run.identity, run.identity[:10], run.name):
        assert find_run(seen, wanted) == run


def test_an_exact_name_wins_over_longer_ones(seen: Store, recorded: Callable[..., RunFacts]) -> None:
    name = uuid4().hex
    short, long = recorded(name), recorded(f"{name}-spectral-s0")
    assert long.name.startswith(short.name)
    assert find_run(seen, short.name) == short


def test_runs_of_one_identity_are_one_result(seen: Store, recorded: Callable[..., RunFacts]) -> None:
    identity, name = uuid4().hex[:16], uuid4().hex
    failed = recorded(name, identity, ending="failed")
    finished = recorded(name, identity)
    recorded(name, identity, ending="failed")
    assert find_run(seen, identity) == finished
    assert find_run(seen, f"{name}-spectral-s0") == finished
    assert find_run(seen, failed.mlflow_id) == failed


def test_ambiguous_names_are_listed(seen: Store, recorded: Callable[..., RunFacts]) -> None:
    name = uuid4().hex
    first, second = recorded(name), recorded(name)
    with pytest.raises(BadInput, match="may be any of 2 runs") as refusal:
        find_run(seen, name)
    assert first.mlflow_id in str(refusal.value)
    assert second.mlflow_id in str(refusal.value)


def test_unknown_names_are_answered_with_close_ones(seen: Store, run: RunFacts) -> None:
    with pytest.raises(BadInput, match=r"no run 'unit-spectrl-s0'.*\nDid you mean:\n.*unit-spectral-s0") as refusal:
        find_run(seen, "unit-spectrl-s0")
    assert run.mlflow_id in str(refusal.value)
    with pytest.raises(BadInput, match="The latest are:"):
        find_run(seen, "%" * 9)
    with pytest.raises(BadInput, match="no run ''"):
        find_run(seen, "")


def test_numbers_come_back_as_they_were(book: Store, run: RunFacts, synthetic: Any) -> None:
    explanation = read_explanation(book, run)
    result = synthetic.result(synthetic.started())
    assert explanation.notes == ((1, "client 3 was left out"),)
    identification, relabeling = explanation.identification, explanation.relabeling
    assert identification is not None
    assert identification.facts["notes"] == ["no fallback"]
    columns = ["mean", "energy", "maximum"]
    np.testing.assert_allclose(identification.clients[columns], result.identification.descriptors)
    assert identification.clients["predicted_noisy"].tolist() == result.predicted_noisy.tolist()
    assert relabeling is not None
    assert relabeling.checkpoints["after_round"].tolist() == [1, 2]
    assert relabeling.clients["client"].tolist() == [0, 2, 3, 4]
    assert relabeling.references is not None
    assert relabeling.references["providers"].isna().tolist() == [False, False, False, True]
    assert relabeling.references["class"].tolist() == list(synthetic.classes)


def test_relabelling_alone_can_be_explained(book: Store, recorded: Callable[..., RunFacts]) -> None:
    explanation = read_explanation(book, recorded("labels", identifies=False))
    assert explanation.identification is None
    assert explanation.relabeling is not None
    assert explanation.relabeling.references is None
    assert explanation.relabeling.clients["client"].tolist() == [0, 1, 2, 3, 4]


def test_verdicts_without_spectra_have_no_files_of_spectra(
    book: Store, recorded: Callable[..., RunFacts], synthetic: Any
) -> None:
    verdict = synthetic.result(synthetic.started()).identification
    votes = replace(
        verdict,
        descriptors=np.full_like(verdict.descriptors, np.nan),
        similarity=np.full_like(verdict.similarity, np.nan),
        split="class_losses",
        mixture=None,
    )
    run = recorded("votes", changes={"identification": votes}, figures=True, relabels=False)
    explanation = read_explanation(book, run)
    assert explanation.relabeling is None
    assert explanation.identification is not None
    assert explanation.identification.clients["score"].isna().all()
    files = {Path(f.path).name for f in book.client.list_artifacts(run.mlflow_id, "identification")}
    assert files == {"descriptors.csv", "identification.json", "posterior.png"}


@pytest.mark.parametrize(("ending", "parts"), [("failed", "FAILED.*client 3 broke"), ("open", "is RUNNING")])
def test_unfinished_runs_are_refused(book: Store, recorded: Callable[..., RunFacts], ending: str, parts: str) -> None:
    with pytest.raises(BadInput, match=parts):
        read_explanation(book, recorded(f"unfinished-{ending}", ending=ending))


def test_methods_that_decide_nothing_are_named(book: Store, recorded: Callable[..., RunFacts]) -> None:
    run = recorded("nothing", identifies=False, relabels=False)
    with pytest.raises(BadInput, match=r"nothing to explain: spectral has neither judged clients nor changed labels"):
        read_explanation(book, run)


def test_lost_files_are_told(book: Store, recorded: Callable[..., RunFacts]) -> None:
    run = recorded("lost")
    folder = Path(book.client.get_run(run.mlflow_id).info.artifact_uri.removeprefix("file://"))
    (folder / "summary.json").unlink()
    with pytest.raises(BadInput, match=r"summary.json of run .* cannot be read"):
        read_explanation(book, run)


def test_reading_creates_no_store(tmp_path: Path, book: Store) -> None:
    file = tmp_path / "none.db"
    with pytest.raises(BadInput, match="no run is recorded"):
        existing_store(TrackingConfig(uri=f"sqlite:///{file}"))
    assert not file.exists()
    with pytest.raises(BadInput, match="experiment 'empty'"):
        existing_store(TrackingConfig(uri=book.uri, experiment="empty"))
    assert book.client.get_experiment_by_name("empty") is None
    with pytest.raises(BadInput, match="no server answers"):
        existing_store(TrackingConfig(uri="http://127.0.0.1:1"))
    assert existing_store(TrackingConfig(uri=book.uri, experiment=book.experiment)).experiment_id == book.experiment_id
