from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from mlflow.exceptions import MlflowException
from PIL import Image
from safetensors.numpy import load_file

from fedsir.config.run import RunConfig
from fedsir.errors import RunFailed
from fedsir.events import FINAL_METRICS, ROUND_METRICS, RoundFinished, RunFinished, RunStarted, RunStopped
from mlflow_tracking.artifacts import write_start
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.describe import parameters
from mlflow_tracking.recorder import MlflowRecorder
from mlflow_tracking.store import Store


def runs_of(store: Store, run_id: str) -> list[Any]:
    """Newest first."""
    return store.runs(f"tags.`fedsir.run_id` = '{run_id}'")


def only_run(store: Store, run_id: str) -> Any:
    (run,) = runs_of(store, run_id)
    return run


def steps(store: Store, mlflow_id: str, key: str) -> list[int]:
    return [point.step for point in store.client.get_metric_history(mlflow_id, key)]


def play(recorder: MlflowRecorder, started: RunStarted, rounds: range, synthetic: Any) -> None:
    recorder.record(started)
    for t in rounds:
        recorder.record(RoundFinished(synthetic.record(t), total_rounds=5))


@pytest.fixture(scope="module")
def finished(store: Store, synthetic: Any) -> tuple[RunStarted, Any, Path]:
    """Started event, MLflow run and artifact folder of one complete run."""
    started = synthetic.started()
    recorder = MlflowRecorder(store)
    play(recorder, started, range(1, 4), synthetic)
    recorder.record(RunFinished(synthetic.result(started)))
    assert recorder.mlflow_run_id is None
    run = only_run(store, started.run_id)
    return started, run, Path(run.info.artifact_uri.removeprefix("file://"))


def test_finished_run_has_status_name_tags_and_input(finished: tuple[RunStarted, Any, Path]) -> None:
    started, run, _ = finished
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "unit-spectral-s0"
    tags = run.data.tags
    assert tags["fedsir.condition"] == "phantom-kermany_sym0.6_a2_k10"
    assert (tags["fedsir.method"], tags["fedsir.data_kind"]) == ("spectral", "phantom")
    assert {f"version.{p}" for p in ("fedsir", "torch", "lightning", "ray", "mlflow")} <= set(tags)
    for text in (*started.dataset.notes, *started.facts.notes, "phantom"):
        assert text in tags["mlflow.note.content"]
    (data,) = run.inputs.dataset_inputs
    assert data.dataset.name == "phantom-kermany"
    assert started.dataset.digest.startswith(data.dataset.digest)


def test_metrics_are_the_contracts_and_few(store: Store, finished: tuple[RunStarted, Any, Path]) -> None:
    _, run, _ = finished
    assert set(run.data.metrics) <= {*ROUND_METRICS, *FINAL_METRICS}
    assert len({*ROUND_METRICS, *FINAL_METRICS}) <= 30
    assert steps(store, run.info.run_id, "test/accuracy") == [1, 2, 3]
    assert steps(store, run.info.run_id, "final/accuracy") == [0]
    assert run.data.metrics["final/accuracy_low"] == 0.7


def test_artifacts_are_complete_and_readable(finished: tuple[RunStarted, Any, Path]) -> None:
    _, _, folder = finished
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert files == [
        "clients.csv",
        "config.yaml",
        "evaluation/confusion.png",
        "evaluation/per_class.csv",
        "evaluation/predictions.csv",
        "federation/counts.png",
        "federation/federation.csv",
        "identification/descriptors.csv",
        "identification/descriptors.png",
        "identification/identification.json",
        "identification/similarity.csv",
        "identification/similarity.png",
        "labels.csv",
        "relabeling/checkpoints.csv",
        "relabeling/checkpoints.png",
        "relabeling/clients.csv",
        "relabeling/flow.csv",
        "relabeling/flow.png",
        "relabeling/margins.csv",
        "relabeling/margins.png",
        "relabeling/outcomes.csv",
        "relabeling/references.csv",
        "summary.json",
        "weights/last.safetensors",
    ]
    for path in folder.rglob("*.png"):
        with Image.open(path) as image:
            image.verify()
    assert all(len(pd.read_csv(path)) for path in folder.rglob("*.csv"))


def test_tables_tell_truth_beside_verdict(finished: tuple[RunStarted, Any, Path]) -> None:
    started, _, folder = finished
    clients = pd.read_csv(folder / "clients.csv")
    assert clients["truly_noisy"].tolist() == started.truth.noisy.tolist()
    assert clients["predicted_noisy"].tolist() == [True, False, True, True, True]
    assert (clients["recovered"] <= clients["relabelled"]).all()
    labels = pd.read_csv(folder / "labels.csv")
    assert len(labels) == started.federation.sizes.sum()
    assert (labels["corrected"] != labels["observed"]).sum() == clients["relabelled"].sum() > 0


def test_summary_is_strict_json_and_config_reads_back(finished: tuple[RunStarted, Any, Path]) -> None:
    started, _, folder = finished

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    summary = json.loads((folder / "summary.json").read_text(), parse_constant=refuse)
    assert summary["final"]["test/loss"] is None
    assert summary["data"]["kind"] == "phantom"
    assert summary["truly_noisy"] == [2, 3, 4]
    assert summary["weights_sha256"] == "ab" * 32
    assert yaml.safe_load((folder / "config.yaml").read_text()) == started.config.model_dump(mode="json")


def test_no_password_is_among_the_files(synthetic: Any, tmp_path: Path) -> None:
    class Recorded(RunConfig):
        tracking: TrackingConfig

    uri = "postgresql+psycopg://me:secret@db/runs"
    plain = synthetic.config().model_dump(exclude={"method"})
    write_start(
        synthetic.started(Recorded.model_validate({**plain, "method": {"name": "fedavg"}, "tracking": {"uri": uri}})),
        tmp_path,
    )
    text = (tmp_path / "config.yaml").read_text()
    assert "secret" not in text
    assert yaml.safe_load(text)["tracking"]["uri"] == "postgresql+psycopg://me:***@db/runs"


def test_weights_have_state_dict_names_shapes_and_types(finished: tuple[RunStarted, Any, Path]) -> None:
    weights = load_file(finished[2] / "weights" / "last.safetensors")
    assert {name: value.shape for name, value in weights.items()} == {
        "head.weight": (2, 3),
        "norm.running_mean": (2,),
        "norm.num_batches_tracked": (),
    }
    assert weights["norm.num_batches_tracked"].dtype == np.int64
    np.testing.assert_array_equal(weights["norm.running_mean"], [6, 7])


@pytest.mark.parametrize(("figures", "weights"), [(False, True), (True, False), (False, False)])
def test_what_is_switched_off_is_left_out_and_nothing_else(
    store: Store,
    synthetic: Any,
    finished: tuple[RunStarted, Any, Path],
    monkeypatch: pytest.MonkeyPatch,
    figures: bool,
    weights: bool,
) -> None:
    complete = finished[2]
    if not figures:
        # Nothing that draws is even loaded.
        monkeypatch.setitem(sys.modules, "mlflow_tracking.drawings", None)
    # The same run again, as its identity and with it the files are the same.
    started = synthetic.started(finished[0].config, finished[0].run_id)
    recorder = MlflowRecorder(store, TrackingConfig(figures=figures, weights=weights))
    play(recorder, started, range(1, 4), synthetic)
    recorder.record(RunFinished(synthetic.result(started)))
    folder = Path(runs_of(store, started.run_id)[0].info.artifact_uri.removeprefix("file://"))
    kept = {p.relative_to(folder) for p in folder.rglob("*") if p.is_file()}
    assert kept == {
        path
        for path in (p.relative_to(complete) for p in complete.rglob("*") if p.is_file())
        if (figures or path.suffix != ".png") and (weights or path.suffix != ".safetensors")
    }
    for path in kept:
        assert (folder / path).read_bytes() == (complete / path).read_bytes()


def test_without_figures_matplotlib_is_not_loaded(start_python: Any) -> None:
    code = "import sys, mlflow_tracking.artifacts, mlflow_tracking.recorder; sys.exit('matplotlib' in sys.modules)"
    assert start_python(code).wait(timeout=120) == 0


def test_method_without_identification_leaves_its_files_out(store: Store, synthetic: Any) -> None:
    started = synthetic.started(synthetic.config(synthetic.plain()))
    recorder = MlflowRecorder(store)
    recorder.record(started)
    recorder.record(RunFinished(synthetic.result(started, identifies=False, relabels=False)))
    run = only_run(store, started.run_id)
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert run.info.status == "FINISHED"
    assert not (folder / "identification").exists()
    assert not (folder / "relabeling").exists()
    assert pd.read_csv(folder / "clients.csv")["predicted_noisy"].isna().all()


def test_parameters_have_the_same_keys_for_all_methods_and_sources(synthetic: Any, tmp_path: Path) -> None:
    asymmetric = {"noise": {"type": "asymmetric", "label_map": {"CNV": "DME"}}}
    configs = [
        synthetic.config(synthetic.plain()),
        synthetic.config(synthetic.spectral(), federation=asymmetric),
        synthetic.config(data={"source": "kermany", "root": tmp_path}),
        synthetic.config(data={"source": "cohort", "manifest": tmp_path / "uic.csv"}),
        synthetic.config(data={"source": "medmnist", "path": tmp_path / "octmnist.npz"}),
    ]
    values = [parameters(synthetic.started(config)) for config in configs]
    assert all(v.keys() == values[0].keys() for v in values)
    assert len(values[0]) <= 40
    assert all(0 < len(text) <= 250 for v in values for text in v.values())
    assert values[1]["method_settings"] == "components=12, relabel_after=20"
    assert values[1]["label_map"] == "CNV>DME"
    assert {v["cohort"] for v in values} == {"kermany", tmp_path.name, "uic", "octmnist"}


def test_undefined_and_unknown_figures_are_left_out(store: Store, synthetic: Any) -> None:
    started, recorder = synthetic.started(), MlflowRecorder(store, TrackingConfig(flush_seconds=0.0))
    recorder.record(started)
    record = synthetic.record(1, **{"ident/margin": float("nan"), "train/loss": float("inf"), "other/thing": 1.0})
    recorder.record(RoundFinished(record, total_rounds=5))
    assert set(only_run(store, started.run_id).data.metrics) == {"test/accuracy", "test/macro_f1"}
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))


@pytest.mark.parametrize(("killed", "status"), [(True, "KILLED"), (False, "FAILED")])
def test_stopped_run_has_status_and_reason(store: Store, synthetic: Any, killed: bool, status: str) -> None:
    started, recorder = synthetic.started(), MlflowRecorder(store)
    play(recorder, started, range(1, 2), synthetic)
    recorder.record(RunStopped(ValueError("client 3 " + "x" * 9000), killed=killed))
    run = only_run(store, started.run_id)
    assert run.info.status == status
    assert run.info.end_time is not None
    assert run.data.tags["fedsir.error"].startswith("ValueError: client 3")
    assert len(run.data.tags["fedsir.error"]) <= 500
    recorder.record(RunStopped(ValueError(), killed=False))  # nothing is open any more


@pytest.mark.parametrize("ending", ["failed", "vanished"])
def test_resumed_run_continues_without_repeating_points(store: Store, synthetic: Any, ending: str) -> None:
    started = synthetic.started()
    first = MlflowRecorder(store)
    play(first, started, range(1, 3), synthetic)
    if ending == "failed":
        first.record(RunStopped(RuntimeError("gone"), killed=False))
    earlier = only_run(store, started.run_id).info.run_id

    # The checkpoint is one round ahead of the record: its third round was never sent.
    history = tuple(synthetic.record(t) for t in (1, 2, 3))
    second = MlflowRecorder(store)
    second.record(synthetic.started(started.config, started.run_id, history))
    assert only_run(store, started.run_id).info.status == "RUNNING"
    play_on = [RoundFinished(synthetic.record(t), total_rounds=5) for t in (3, 4, 5)]
    for event in play_on:
        second.record(event)
    second.record(RunFinished(synthetic.result(started)))

    run = only_run(store, started.run_id)
    assert run.info.run_id == earlier
    assert run.info.status == "FINISHED"
    for key in ("test/accuracy", "test/macro_f1", "train/loss"):
        assert sorted(steps(store, earlier, key)) == [1, 2, 3, 4, 5]
    assert run.data.tags["fedsir.resumed"] == "1"
    assert "fedsir.error" not in run.data.tags
    assert len(run.inputs.dataset_inputs) == 1


def test_resuming_without_a_record_logs_the_whole_history(store: Store, synthetic: Any) -> None:
    history = tuple(synthetic.record(t) for t in range(1, 401))  # more points than one batch takes
    started = synthetic.started(history=history)
    recorder = MlflowRecorder(store)
    recorder.record(started)
    assert steps(store, recorder.mlflow_run_id or "", "train/loss") == list(range(1, 401))
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))


def test_finished_runs_are_not_reopened(store: Store, synthetic: Any) -> None:
    started = synthetic.started()
    recorder = MlflowRecorder(store)
    play(recorder, started, range(1, 2), synthetic)
    recorder.record(RunFinished(synthetic.result(started)))
    again = synthetic.started(started.config, started.run_id, (synthetic.record(1),))
    play(recorder, again, range(2, 3), synthetic)
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))
    assert sorted(run.info.status for run in runs_of(store, started.run_id)) == ["FINISHED", "KILLED"]


def test_starting_anew_ends_the_interrupted_predecessor(store: Store, synthetic: Any) -> None:
    started = synthetic.started()
    MlflowRecorder(store).record(started)
    recorder = MlflowRecorder(store)
    recorder.record(started)
    old = next(r for r in runs_of(store, started.run_id) if r.info.run_id != recorder.mlflow_run_id)
    assert old.info.status == "KILLED"
    assert old.data.tags["fedsir.superseded_by"] == recorder.mlflow_run_id
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))


def test_failing_artifacts_fail_the_run(store: Store, synthetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("mlflow_tracking.artifacts.write_finish", refuse)
    started, recorder = synthetic.started(), MlflowRecorder(store)
    recorder.record(started)
    with pytest.raises(RunFailed, match=r"unit-spectral-s0.*the result could not be recorded.*disk full"):
        recorder.record(RunFinished(synthetic.result(started)))
    run = only_run(store, started.run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["fedsir.error"] == "OSError: disk full"


def test_a_data_set_that_another_process_adds_at_the_same_time_is_used(
    store: Store, synthetic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = type(store.client).log_inputs
    attempts = []

    def too_late_once(client: Any, run_id: str, **named: Any) -> None:
        attempts.append(run_id)
        if len(attempts) == 1:
            raise MlflowException("UNIQUE constraint failed: datasets.name, datasets.digest")
        send(client, run_id, **named)

    monkeypatch.setattr(type(store.client), "log_inputs", too_late_once)
    started, recorder = synthetic.started(), MlflowRecorder(store, TrackingConfig(figures=False))
    recorder.record(started)
    assert len(only_run(store, started.run_id).inputs.dataset_inputs) == 1
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))


def test_store_lost_while_stopping_does_not_hide_the_error(
    store: Store, synthetic: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionError("server gone")

    started, recorder = synthetic.started(), MlflowRecorder(store)
    recorder.record(started)
    with monkeypatch.context() as patch:
        patch.setattr(type(store.client), "set_terminated", refuse)
        recorder.record(RunStopped(ValueError("the real reason"), killed=False))
    assert "stays without an end" in caplog.text


def test_events_without_a_start_are_refused(store: Store, synthetic: Any) -> None:
    with pytest.raises(RunFailed, match="no run has been started"):
        MlflowRecorder(store).record(RoundFinished(synthetic.record(1), total_rounds=5))
