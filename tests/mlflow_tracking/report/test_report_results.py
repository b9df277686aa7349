from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pandas as pd
import pytest

from fedsir.events import FINAL_METRICS, ROUND_METRICS, RoundFinished, RunFinished, RunStopped
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.recorder import MlflowRecorder
from mlflow_tracking.report import reading
from mlflow_tracking.report.reading import Recorded, StoreReader, read_records
from mlflow_tracking.report.results import CELL, RUNS, config_text, read_results, results_of
from mlflow_tracking.store import Store, prepare_store

PARAMS = {
    "dataset": "phantom-kermany",
    "data_kind": "phantom",
    "source": "phantom",
    "cohort": "kermany",
    "rounds": "6",
    "local_epochs": "1",
    "train_images": "2000",
    "clients": "30",
    "clean_clients": "3",
    "alpha": "2",
    "noise_type": "symmetric",
    "noise_ratio": "0.3",
    "label_map": "-",
    "method": "fedavg",
    "method_settings": "-",
    "seed": "0",
}
CONFIG = """\
name: a
seed: {seed}
data:
  source: phantom
federation:
  clients: 30
  clean_clients: {clean}
method:
  name: fedprox
  preset: null
  mu: {mu}
"""


@pytest.fixture
def recorded() -> Callable[..., Recorded]:
    """An MLflow run; keywords that are no fields are parameters. Later ones are older."""
    clock = iter(range(1000, 0, -1))

    def make(
        *, identity: str = "", status: str = "FINISHED", error: str = "", accuracy: float | None = 0.8, **params: Any
    ) -> Recorded:
        own = uuid4().hex
        values = {**PARAMS, **{k: str(v) for k, v in params.items()}}
        tags = {"fedsir.run_id": identity or own[:16], **({"fedsir.error": error} if error else {})}
        metrics = {} if accuracy is None else {"final/accuracy": accuracy}
        return Recorded(own, f"run-{own[:4]}", status, next(clock), 5.0, "", tags, values, metrics)

    return make


def results(records: list[Recorded], configs: dict[str, str] | None = None) -> Any:
    known = configs or {}
    return results_of(records, "a store", None, lambda record: known.get(record.mlflow_id))  # type: ignore[arg-type]


def test_a_finished_run_becomes_a_row_with_every_column(recorded: Callable[..., Recorded]) -> None:
    found = results([recorded(seed=2, noise_ratio="0.6")])
    assert tuple(found.runs.columns) == RUNS
    row = found.runs.iloc[0]
    assert (row["task"], row["noise"], row["ratio"], row["alpha"]) == ("Kermany", "symmetric", 0.6, 2.0)
    assert (row["method"], row["seed"], row["budget"]) == ("fedavg", 2, "6 rounds × 1 local epoch")
    assert row["final/accuracy"] == 0.8
    assert np.isnan(row["relabel/edit"])
    assert found.warnings == ()


def test_fedavg_without_noise_is_the_all_clean_reference(recorded: Callable[..., Recorded]) -> None:
    clean = {"noise_type": "none", "noise_ratio": 0, "clean_clients": 30}
    found = results([recorded(**clean), recorded(**clean, method="fedprox")])
    assert set(found.runs["method"]) == {"all_clean", "fedprox"}
    assert set(found.runs["noise"]) == {"none"}


def test_the_budget_says_what_tells_runs_of_a_task_apart(recorded: Callable[..., Recorded]) -> None:
    found = results([recorded(rounds=6), recorded(rounds=100), recorded(rounds=100, image_size=64), recorded(seed=1)])
    assert set(found.runs["budget"]) == {
        "6 rounds × 1 local epoch, unknown px",
        "100 rounds × 1 local epoch, unknown px",
        "100 rounds × 1 local epoch, 64 px",
    }
    assert found.runs.groupby("budget").size().max() == 2
    sampled = results([recorded(rounds=6), recorded(rounds=6, participation="0.5")])
    assert {b.rpartition(", ")[2] for b in sampled.runs["budget"]} == {"participation 1", "participation 0.5"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("local_epochs", 5),
        ("batch_size", 64),
        ("lr", "0.1"),
        ("weights", "random"),
        ("backbone", "tiny"),
        ("train_images", 10),
        ("clients", 20),
        ("data_kind", "real"),
        ("data_seed", 1),
        ("partition", "split, by patient"),
        ("precision", "bf16-mixed"),
        ("participation", "0.5"),
    ],
)
def test_each_part_of_a_budget_counts(recorded: Callable[..., Recorded], key: str, value: Any) -> None:
    assert results([recorded(), recorded(**{key: value})]).runs["budget"].nunique() == 2


def test_where_a_run_went_on_is_no_budget(recorded: Callable[..., Recorded]) -> None:
    found = results([recorded(device="cpu", seed=0), recorded(device="cuda", threads=4, seed=1)])
    assert found.runs["budget"].nunique() == 1


def test_clean_clients_asked_for_are_read_from_the_configuration(recorded: Callable[..., Recorded]) -> None:
    """What the draw gave may differ between seeds of one configuration, and be equal for different ones."""
    three, four, more = recorded(seed=0), recorded(seed=0), recorded(seed=1, clean_clients=5)
    unread = recorded(seed=2)
    texts = {
        three.mlflow_id: CONFIG.format(seed=0, clean=3, mu=1),
        four.mlflow_id: CONFIG.format(seed=0, clean=4, mu=1),
        more.mlflow_id: CONFIG.format(seed=1, clean=3, mu=1),
    }
    found = results([three, four, more], texts).runs.set_index("mlflow_id")["budget"]
    assert found[three.mlflow_id] == found[more.mlflow_id] == "6 rounds × 1 local epoch, 3 clean"
    assert found[four.mlflow_id] == "6 rounds × 1 local epoch, 4 clean"
    # A run whose file is gone belongs to the others where they agree, and nowhere where they do not.
    assert results([three, more, unread], texts).runs["budget"].nunique() == 1
    assert results([three, four, unread], texts).runs["budget"].nunique() == 3


def test_settings_of_a_method_never_share_a_cell(recorded: Callable[..., Recorded]) -> None:
    """Also with different seeds; labels name what differs."""
    weak, strong = recorded(method="fedprox", seed=0), recorded(method="fedprox", seed=1)
    texts = {
        weak.mlflow_id: CONFIG.format(seed=0, clean=3, mu=0.1),
        strong.mlflow_id: CONFIG.format(seed=1, clean=3, mu=0.5),
    }
    found = results([weak, strong], texts)
    assert set(found.runs["method"]) == {"fedprox (mu=0.1)", "fedprox (mu=0.5)"}
    assert "2 settings" in found.warnings[0]


def test_a_run_whose_configuration_is_gone_has_the_settings_its_parameters_name(
    recorded: Callable[..., Recorded],
) -> None:
    read, unread = (recorded(method="fedprox", seed=seed, method_settings="mu=0.1") for seed in (0, 1))
    other = recorded(method="fedprox", seed=2, method_settings="mu=0.5")
    texts = {read.mlflow_id: CONFIG.format(seed=0, clean=3, mu=0.1)}
    assert set(results([read, unread], texts).runs["method"]) == {"fedprox"}
    assert results([read, unread, other], texts).runs["method"].nunique() == 2
    # Two configurations behind one parameter, which is cut where they differ.
    third = recorded(method="fedprox", seed=3, method_settings="mu=0.1")
    texts[third.mlflow_id] = CONFIG.format(seed=3, clean=3, mu=0.11)
    assert results([read, unread, third], texts).runs["method"].nunique() == 3


def test_settings_that_belong_to_conditions_are_one_method(recorded: Callable[..., Recorded]) -> None:
    found = results(
        [
            recorded(method="fedprox", method_settings="mu=1"),
            recorded(method="fedprox", alpha=1, method_settings="mu=2"),
        ]
    )
    assert set(found.runs["method"]) == {"fedprox"}
    assert found.warnings == ()


def test_another_map_of_asymmetric_noise_is_another_noise(recorded: Callable[..., Recorded]) -> None:
    maps = ("kermany", "CNV>DME")
    found = results([recorded(noise_type="asymmetric", label_map=name) for name in maps])
    assert set(found.runs["noise"]) == {"asymmetric", "asymmetric (CNV>DME)"}
    alone = results([recorded(noise_type="asymmetric", label_map="CNV>DME")])
    assert set(alone.runs["noise"]) == {"asymmetric"}


def test_of_repeated_runs_the_newest_counts(recorded: Callable[..., Recorded]) -> None:
    new, old = recorded(identity="x", accuracy=0.9), recorded(identity="x", accuracy=0.1)
    found = results([new, old])
    assert found.runs["final/accuracy"].tolist() == [0.9]
    assert "finished more than once" in found.warnings[0]


def test_of_runs_of_one_cell_the_newest_counts(recorded: Callable[..., Recorded]) -> None:
    found = results([recorded(accuracy=0.9), recorded(accuracy=0.1)])
    assert found.runs["final/accuracy"].tolist() == [0.9]
    assert "several runs" in found.warnings[0]


def test_what_did_not_finish_is_told_apart(recorded: Callable[..., Recorded]) -> None:
    records = [
        recorded(identity="good"),
        recorded(identity="good", status="FAILED", error="earlier"),
        recorded(identity="bad", status="FAILED", error="RunFailed: no memory"),
        recorded(identity="bad", status="KILLED"),
        recorded(identity="open", status="RUNNING"),
        recorded(identity="open", status="FAILED", error="earlier"),
        recorded(identity="empty", accuracy=None),
        recorded(identity="odd", seed="many"),
    ]
    found = results(records)
    assert found.runs["run_id"].tolist() == ["good"]
    assert found.failed["error"].tolist() == ["RunFailed: no memory"]
    assert set(found.unfinished["error"]) == {
        "running",
        "finished without a final accuracy",
        "its parameter seed is 'many', not a number",
    }
    assert found.warnings[0].startswith("1 run failed")
    assert found.warnings[1].startswith("3 runs did not finish")


def test_an_experiment_without_runs_gives_empty_tables() -> None:
    found = results([])
    assert found.runs.empty
    assert tuple(found.runs.columns) == RUNS
    assert found.data_kinds == ()


@pytest.fixture(scope="module")
def filled(store: Store, synthetic: Any) -> Store:
    """Three runs as the recorder writes them: finished, failed, and resumed; in an experiment of their own."""
    config = TrackingConfig(uri=store.uri, experiment="report", figures=False)
    own = prepare_store(config)
    for run_id, seed in (("finished", 0), ("failed", 1), ("resumed", 2)):
        started = synthetic.started(synthetic.config(seed=seed), run_id=run_id)
        recorder = MlflowRecorder(own, config)
        recorder.record(started)
        recorder.record(RoundFinished(synthetic.record(1, **{"bytes/up": 3.0, "test/loss": float("nan")}), 2))
        if run_id != "finished":
            recorder.record(RunStopped(RuntimeError("no <memory>"), killed=run_id == "resumed"))
        if run_id == "resumed":
            history = (synthetic.record(1, **{"bytes/up": 3.0}),)
            recorder.record(synthetic.started(started.config, run_id=run_id, history=history))
        if run_id != "failed":
            recorder.record(RoundFinished(synthetic.record(2, **{"bytes/up": 4.0}), 2))
            recorder.record(RunFinished(synthetic.result(started)))
    return own


def test_sqlite_and_the_search_say_the_same(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    by_tables = read_records(filled)
    ids = [record.mlflow_id for record in by_tables]
    reader = StoreReader(filled)
    keys = ("test/accuracy", "bytes/up")
    curves, totals = reader.curves(keys, ids), reader.totals(keys, ids)
    monkeypatch.setattr(reading, "sqlite_path", lambda _: None)
    by_search = read_records(filled)

    def told(records: list[Recorded]) -> dict[str, Recorded]:
        return {record.mlflow_id: record for record in records}

    assert told(by_search) == told(by_tables)
    pd.testing.assert_frame_equal(reader.curves(keys, ids), curves)
    pd.testing.assert_frame_equal(reader.totals(keys, ids), totals, check_names=False)


def test_a_store_is_read_whole(filled: Store) -> None:
    found = read_results(filled)
    assert set(found.runs["run_id"]) == {"finished", "resumed"}
    assert found.failed["error"].tolist() == ["RuntimeError: no <memory>"]
    assert found.runs["budget"].nunique() == 1
    assert set(RUNS) >= {*FINAL_METRICS, *ROUND_METRICS}
    runs = found.runs.set_index("run_id")
    assert runs.loc["finished", "seconds"] >= 0
    # The clock went on between the parts of a resumed run.
    assert np.isnan(runs.loc["resumed", "seconds"])
    ids = found.runs["mlflow_id"].tolist()
    assert found.totals(["bytes/up", "bytes/down"], ids)["bytes/up"].tolist() == [7.0, 7.0]
    assert found.totals(["bytes/down"], ids)["bytes/down"].isna().all()
    assert found.curves(["test/accuracy"], ids[:1])[["step", "value"]].values.tolist() == [[1.0, 0.1], [2.0, 0.2]]
    assert found.curves(["test/accuracy"], []).empty


def test_only_the_runs_that_are_asked_for_count(filled: Store) -> None:
    found = read_results(filled, {"finished", "nobody"})
    assert found.runs["run_id"].tolist() == ["finished"]
    assert found.failed.empty
    assert found.warnings == ("2 other runs of the experiment are left out.",)


def test_totals_of_more_runs_and_keys_are_right_after_fewer(filled: Store) -> None:
    reader = StoreReader(filled)
    one, other = read_results(filled).runs["mlflow_id"].tolist()
    assert reader.totals(["bytes/up"], [one])["bytes/up"].tolist() == [7.0]
    more = reader.totals(["bytes/up", "test/accuracy"], [other, one])
    assert more.index.tolist() == [other, one]
    assert more.to_numpy() == pytest.approx(reader.totals(["bytes/up", "test/accuracy"], [one, other]).to_numpy())
    assert more["bytes/up"].tolist() == [7.0, 7.0]
    assert more["test/accuracy"].tolist() == pytest.approx([0.3, 0.3])


def test_files_are_found_and_missing_ones_are_none(filled: Store) -> None:
    found = read_results(filled)
    mlflow_id = found.runs["mlflow_id"].iloc[0]
    path = found.artifact(mlflow_id, "relabeling/flow.csv")
    assert path is not None
    assert path.is_file()
    assert found.artifact(mlflow_id, "relabeling/nothing.csv") is None
    with pytest.raises(KeyError):
        found.artifact("nobody", "summary.json")


def test_files_of_servers_are_downloaded(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "local_folder", lambda _: None)
    found = read_results(filled)
    mlflow_id = found.runs["mlflow_id"].iloc[0]
    path = found.artifact(mlflow_id, "relabeling/flow.csv")
    assert path is not None
    assert "artifacts" not in path.parts
    assert path.read_text().startswith(next(iter(pd.read_csv(path).columns)))
    assert found.artifact(mlflow_id, "relabeling/nothing.csv") is None
    assert found.artifact(mlflow_id, "nowhere/nothing.csv") is None


def test_configurations_on_servers_are_not_asked_for(recorded: Callable[..., Recorded], tmp_path: Path) -> None:
    record = recorded()
    assert config_text(record) is None
    (tmp_path / "config.yaml").write_text("name: a\n")
    of_folder = Recorded(**{**vars(record), "artifact_uri": tmp_path.as_uri()})
    assert config_text(of_folder) == "name: a\n"
    assert config_text(Recorded(**{**vars(record), "artifact_uri": "mlflow-artifacts:/1/x"})) is None


def test_rows_are_told_apart_by_their_cell(frames: Any) -> None:
    rows = frames.results(frames.grid(["fedavg", "all_clean"])).runs
    assert not rows.duplicated(list(CELL)).any()
