"""The benchmark at tiny sizes: that it compares equal work and reports what it promises. No time is asserted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.bench import memory as bench_memory
from experiments.bench.cases import settings
from experiments.bench.floor import Floor, Plan
from experiments.bench.growth import Growth
from experiments.bench.imports import Imports, by_package
from experiments.bench.memory import Memory, growth_of_memory
from experiments.bench.plan import count_steps, floor_plan
from experiments.bench.preparation import preparation, write_pictures
from experiments.bench.processes import Peaks, family, processor_seconds, resident_mb
from experiments.bench.tables import LISTED_PACKAGES, growth_table, imports_table, memory_table
from experiments.config import RunFile
from fedsir.clients.executor import InProcessExecutor
from fedsir.condition import Condition
from fedsir.coordinator import weights_hash
from fedsir.errors import BadInput
from fedsir.models.flat import FlatWeights

linux = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def config() -> RunFile:
    return RunFile.model_validate(settings("tiny", 32, clients=5, images=120, rounds=2))


@pytest.fixture(scope="module")
def condition(lab: Any, config: RunFile) -> Condition:
    found: Condition = lab.condition(config)
    return found


@pytest.fixture(scope="module")
def plan(config: RunFile, condition: Condition) -> Plan:
    return floor_plan(config, condition)


@pytest.fixture(scope="module")
def floor(plan: Plan) -> Iterator[Floor]:
    warm = Floor(plan, processes=2)
    yield warm
    warm.close()


def test_the_floor_ends_with_the_bits_of_the_run_each_time(
    lab: Any, config: RunFile, condition: Condition, floor: Floor
) -> None:
    result = lab.run(config, condition=condition)
    for _ in range(2):
        floor.run()
        assert weights_hash(FlatWeights(*floor.weights())) == result.weights_hash


def test_the_floor_evaluates_the_last_weights(lab: Any, config: RunFile, condition: Condition, floor: Floor) -> None:
    result = lab.run(config, condition=condition)
    floor.run()
    right = floor.logits().argmax(axis=1) == np.asarray(condition.dataset.test.labels)
    assert right.mean() == pytest.approx(result.final["final/accuracy"])


def test_the_floor_takes_the_steps_of_the_run(
    lab: Any, config: RunFile, condition: Condition, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsir.clients import training

    batches: list[int] = []
    take = training.take_step

    def counted(client: Any, batch: Any, index: int) -> float:
        batches.append(len(batch.labels))
        return take(client, batch, index)

    monkeypatch.setattr(training, "take_step", counted)
    lab.run(config, condition=condition, executor=InProcessExecutor())
    assert count_steps(plan) == len(batches)
    assert [len(s.positions) for clients in plan.steps for steps in clients for s in steps] == batches


def test_another_run_has_other_bits(lab: Any, config: RunFile, condition: Condition, floor: Floor) -> None:
    """The comparison of bits can fail: other batches are seen."""
    floor.run()
    other = config.model_copy(update={"training": config.training.model_copy(update={"batch_size": 15})})
    result = lab.run(other, condition=condition)
    assert weights_hash(FlatWeights(*floor.weights())) != result.weights_hash


def test_times_of_the_floor_are_those_of_its_parts(floor: Floor) -> None:
    time = floor.run()
    assert min(time.training, time.averaging, time.evaluation, time.training_cpu) > 0
    assert time.wall == time.training + time.averaging + time.evaluation
    assert time.cpu >= time.training_cpu


def test_the_floor_refuses_what_it_cannot_do(config: RunFile, condition: Condition) -> None:
    dropping = config.model_copy(update={"model": config.model.model_copy(update={"dropout": 0.5})})
    with pytest.raises(BadInput, match="dropout"):
        floor_plan(dropping, condition)
    sampling = config.model_copy(update={"training": config.training.model_copy(update={"participation": 0.5})})
    with pytest.raises(BadInput, match="participation"):
        floor_plan(sampling, condition)


@linux
def test_processor_time_and_memory_of_this_program() -> None:
    before = processor_seconds([os.getpid()])
    sum(i * i for i in range(3_000_000))
    assert processor_seconds([os.getpid()]) > before
    assert os.getpid() in family()
    assert family()[0] == os.getpid()
    assert resident_mb(os.getpid()) > 10
    assert resident_mb(2**30) == 0


def test_peaks_are_of_the_sum_and_of_each_group() -> None:
    peaks = Peaks()
    peaks.see({"program": 10.0, "actor 0": 5.0})
    peaks.see({"program": 4.0, "actor 0": 9.0})
    assert peaks.total == 15.0
    assert peaks.groups == {"program": 10.0, "actor 0": 9.0}


def test_growth_of_memory_is_from_fewest_to_most_clients() -> None:
    found = [
        Memory("fedavg", 1000, 9, 300.0, {}),
        Memory("fednoro", 10, 9, 100.0, {}),
        Memory("fedavg", 10, 9, 200.0, {}),
    ]
    assert growth_of_memory(found) == {"fedavg": 1.5, "fednoro": 1.0}
    assert [column.header for column in memory_table(found).columns][1] == "fedavg, 1000 clients"


def test_growth_without_a_floor_has_no_ratio() -> None:
    rows = [Growth("clients", "4", 4, 120, 8, 2.0, 1.0), Growth("method", "fedsir", 4, 120, None, 2.0, None)]
    assert [row.ratio for row in rows] == [2.0, None]
    assert growth_table(rows).row_count == 2


def test_pictures_to_prepare_are_of_all_classes_and_distinct(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path, 16)
    assert len({path.read_bytes() for path in paths}) == 16
    assert len({path.parent for path in paths}) == 8


def test_preparation_counts_images_per_second() -> None:
    found = preparation(quick=True, say=lambda _: None)
    assert found.images == 16
    assert found.prepared > 0
    assert found.share == pytest.approx(found.prepared / found.pillow)


def test_imports_are_summed_by_package_dearest_first() -> None:
    lines = [
        "import time: self [us] | cumulative | imported package",
        "import time:       200 |        200 |   torch._C",
        "round 1/1",
        "import time:    500000 |     500200 | torch",
        "import time:    700000 |     700000 | ray\n",
    ]
    assert list(by_package(lines).items()) == [("ray", (1, 0.7)), ("torch", (2, pytest.approx(0.5002)))]


def test_the_table_of_imports_counts_what_it_does_not_list() -> None:
    many = {f"package{number}": (2, 0.25) for number in range(LISTED_PACKAGES + 3)}
    columns = imports_table(Imports(program=many, actor={"package0": (1, 1.0)})).columns
    rows = list(zip(*(column.cells for column in columns), strict=True))
    assert rows[0] == ("package0", "2", "0.25", "1", "1.00")
    assert rows[-2] == ("3 others", "6", "0.75", "0", "0.00")
    assert rows[-1] == ("all together", str(2 * len(many)), "4.75", "1", "1.00")


def test_unknown_parts_and_folders_are_refused(fedsir: Any) -> None:
    ended = fedsir.call("bench", "speed")
    assert (ended.code, "startup" in ended.err) == (2, True)
    ended = fedsir.call("bench", "ratio", "--json", "nowhere/bench.json")
    assert (ended.code, "nowhere" in ended.err) == (2, True)


def test_the_command_writes_figures_and_tables(fedsir: Any) -> None:
    ended = fedsir.call("bench", "preparation", "--quick", "--json", "bench.json")
    assert ended.code == 0, ended.err
    assert "Pillow" in ended.out
    found = json.loads(Path("bench.json").read_text())
    assert found["quick"]
    assert found["machine"]["versions"]["torch"]
    assert found["parts"]["preparation"]["images"] == 16


@linux
@pytest.mark.slow
def test_all_other_parts_at_tiny_sizes(fedsir: Any, tmp_path: Path) -> None:
    """In a process of its own, since it starts Ray."""
    words = ("bench", "ratio", "breakdown", "growth", "memory", "startup", "imports", "--quick", "--json", "bench.json")
    process = fedsir.start(tmp_path, *words)
    _, errors = process.communicate(timeout=1800)
    assert process.returncode == 0, errors
    parts = json.loads((tmp_path / "bench.json").read_text())["parts"]
    (case,) = parts["ratio"]
    assert case["same_bits"]
    assert set(case["ratios"]) == {"run", "rounds", "training", "unevaluated", "processor"}
    assert len(case["pairs"]) == 2
    (case,) = parts["breakdown"]
    assert case["worker_processor_seconds"] > 0
    assert case["floor_processor_seconds"] > 0
    assert any("run_backward" in f["name"] for f in case["functions"])
    assert {row["axis"] for row in parts["growth"]} == {"clients", "participation", "images", "method"}
    few, many = parts["memory"]
    assert few["clients"] < many["clients"]
    assert {"program", "actor 0", "actor 1"} <= set(few["parts_mb"])
    assert few["total_mb"] > 0
    for process in ("program", "actor"):
        assert parts["imports"][process]["torch"]["modules"] > 100
        assert parts["imports"][process]["fedsir"]["modules"] > 10
    assert "mlflow" not in parts["imports"]["actor"]
    assert parts["startup"]["first_round"] > parts["startup"]["first_step"] > 0


@linux
@pytest.mark.slow
def test_the_program_needs_little_more_memory_for_a_thousand_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg on 2000 images with two actors: peaks of the program and of all processes together."""
    monkeypatch.setattr(bench_memory, "IMAGES", 2000)
    monkeypatch.setattr(bench_memory, "METHODS", ("fedavg",))
    few, many = bench_memory.memory(quick=False, say=lambda _: None)
    assert (few.clients, many.clients) == (10, 1000)
    assert many.parts[bench_memory.PROGRAM] < 1.5 * few.parts[bench_memory.PROGRAM]
    assert growth_of_memory([few, many])["fedavg"] < 1.5
