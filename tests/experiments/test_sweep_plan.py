"""What `fedsir sweep plan` knows before anything runs: counts, shared work, cost, disk and memory, faults."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.expansion import PLACEHOLDER, Plan, expand
from experiments.grid import load_grid
from experiments.sweeps import calibration
from experiments.sweeps.calibration import Speed, Workload, calibrate, workload
from experiments.sweeps.estimate import STATE_VALUES, Estimate, relative_costs, slots, stage_one_key
from experiments.sweeps.faults import find_faults
from experiments.sweeps.images import image_facts
from experiments.sweeps.needs import disk_line, memory_line, shared_line, time_lines
from experiments.sweeps.tables import plan_table, runs_per_value
from experiments.sweeps.words import duration, many, size
from fedsir.clients.machine import Limits
from fedsir.config.training import ModelConfig
from fedsir.methods import fedavg
from fedsir.methods.cost import Cost, Scale
from fedsir.methods.registry import BUILT_IN, find_method
from fedsir.models.binding import weights_of
from fedsir.models.network import build_network

GRID = """
name: small
base: demo
set: [training.rounds=3, data.train_images=400, data.test_images=50, federation.public_pool=40]
axes:
  noise:
    - {label: mild, set: [federation.noise.type=symmetric, federation.noise.ratio=0.3]}
    - {label: severe, set: [federation.noise.type=asymmetric, federation.noise.ratio=0.9]}
  alpha: {key: federation.partition.alpha, values: [2.0, 0.5]}
methods: [fedavg, rhfl, oct_fedsir, oct_fedsir/no_kd, oct_fedsir/no_la, fedsir, spectral_pruning, all_clean]
seeds: [0, 1]
"""


def machine(monkeypatch: pytest.MonkeyPatch, cpus: Mapping[str, int], memory: Mapping[str, int] | None = None) -> None:
    """Play a machine with these limits, the smallest of which hold."""
    limits = Limits(cpus, memory or {"memory": 2**40})
    for module in ("estimate", "needs"):
        monkeypatch.setattr(f"experiments.sweeps.{module}.machine_limits", lambda: limits)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str = GRID) -> str:
        path = tmp_path / "grid.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def planned(written: Callable[[str], str]) -> Callable[..., Plan]:
    def plan(*overrides: str, only: tuple[str, ...] = (), text: str = GRID) -> Plan:
        return expand(load_grid(written(text)), only, overrides)

    return plan


# Counts and shared work.


def test_runs_per_value(planned: Callable[..., Plan]) -> None:
    counts = runs_per_value(planned())
    assert counts["method"] == {
        "fedavg": 8,
        "rhfl": 8,
        "oct_fedsir": 8,
        "oct_fedsir/no_kd": 8,
        "oct_fedsir/no_la": 8,
        "fedsir": 8,
        "spectral_pruning": 8,
        "all_clean": 4,
    }
    # The all-clean runs belong to both noise settings.
    assert counts["noise"] == {"mild": 32, "severe": 32}
    assert counts["alpha"] == {"2": 30, "0.5": 30}
    assert counts["seed"] == {"0": 30, "1": 30}


def test_only_chosen_values_are_counted(planned: Callable[..., Plan]) -> None:
    counts = runs_per_value(planned(only=("noise=mild", "method=fedavg")))
    assert counts["noise"] == {"mild": 4}
    assert counts["method"] == {"fedavg": 4}
    assert plan_table(planned()).row_count == 4


def test_shared_work(planned: Callable[..., Plan]) -> None:
    """OCT-FedSIR, its ablation without distillation and pruning ask for one stage I; plain cross entropy is another,
    and FedSIR's another one again."""
    estimate = Estimate(planned().runs)
    shared = estimate.shared
    assert shared.federations == 8 + 4
    assert shared.decoded == 1
    assert (shared.stage_one_runs, shared.stage_one) == (5 * 8, 3 * 8)
    assert shared_line(estimate) == "done once: 12 federations, 1 set of images decoded, 24 stages I for 40 runs"
    without = Estimate(planned(only=("method=fedavg", "noise=mild", "alpha=2", "seed=0")).runs)
    assert shared_line(without) == "done once: 1 federation, 1 set of images decoded"


def test_stage_one_is_shared_within_a_condition_only(planned: Callable[..., Plan]) -> None:
    keys: dict[Any, set[str]] = {}
    for run in planned().runs:
        key = stage_one_key(run.config)
        assert (key is None) == (run.cells[0].method in ("fedavg", "rhfl", "all_clean"))
        if key is not None:
            keys.setdefault(key, set()).add(run.config.condition_identity())
    assert all(len(conditions) == 1 for conditions in keys.values())


def test_shared_stage_one_is_counted_once(planned: Callable[..., Plan]) -> None:
    plan = planned(only=("noise=mild", "alpha=2", "seed=0", "method=oct_fedsir", "method=oct_fedsir/no_kd"))
    first, second = (e.work for e in Estimate(plan.runs).runs)
    alone = Estimate(plan.runs[1:]).runs[0].work
    assert first is not None
    assert second is not None
    assert alone is not None
    epochs = plan.runs[0].config.method.model_dump()["stage_one"]["epochs"]
    assert alone.trained - second.trained == epochs * 360
    assert alone.forwarded - second.forwarded == 360
    assert first.trained == alone.trained


# Cost of methods.


def test_every_method_says_what_it_costs() -> None:
    assert [name for name in BUILT_IN if find_method(name).cost is None] == []


# Private models are evaluated one by one; small clients see more of the pool in proportion.
COUNTED = ["fedavg", "fedprox", "rofl", "rhfl", "rhfl/averaged", "fedlsr", "fedelc", "fednoro", "fedsir"]
COUNTED += ["spectral_pruning", "oct_fedsir", "oct_fedsir/no_kd", "oct_fedsir/no_relabeling", "oct_fedsir/equal_steps"]


def tiny(lab: Any, label: str) -> Any:
    name, _, preset = label.partition("/")
    settings: dict[str, Any] = {"name": name, "preset": preset or None}
    if name in ("oct_fedsir", "fedsir"):
        settings["relabeling"] = {"every": 1} if preset != "no_relabeling" else {"enabled": False}
    if preset == "equal_steps":
        settings["stage_one"] = {"length": "steps", "steps": 7}
    return lab.config(settings, training={"rounds": 4, "local_epochs": 2}, federation={"public_pool": 16})


def scale_of(lab: Any, config: Any, clean: float) -> Scale:
    sizes = lab.condition(config).federation.sizes
    return Scale(config.training, len(sizes), clean, float(sizes.mean()), 16)


@pytest.mark.parametrize("label", COUNTED)
def test_costs_are_those_that_a_run_counts(lab: Any, label: str) -> None:
    config = tiny(lab, label)
    result = lab.run(config)
    judged = result.predicted_noisy
    scale = scale_of(lab, config, 1.0 if judged is None else 1.0 - float(np.mean(judged)))
    cost = find_method(config.method.name).cost
    assert cost is not None
    expected: Cost = cost(config.method, scale)
    # Means over clients of passes; shares of the pool and equal steps mean more to small clients.
    near = 0.35 if label in ("rhfl", "oct_fedsir/equal_steps") else 1e-9
    assert expected.trained == pytest.approx(result.totals["cost/client_epochs"] / lab.clients, rel=near)
    assert expected.forwarded == pytest.approx(result.totals["cost/forward_units"] / lab.clients, rel=near)
    assert expected.models == (lab.clients if result.weights is None else 1)


@pytest.mark.parametrize("label", ["fedcorr", "fedned"])
def test_costs_that_depend_on_verdicts_lie_between_the_extremes(lab: Any, label: str) -> None:
    config = tiny(lab, label)
    totals = lab.run(config).totals
    cost = find_method(label).cost
    assert cost is not None
    low, high = sorted(cost(config.method, scale_of(lab, config, clean)).trained for clean in (0.0, 1.0))
    counted = totals["cost/client_epochs"] / lab.clients
    if label == "fedcorr":
        assert low <= counted <= high
    else:
        passes = config.training.rounds * config.training.local_epochs
        assert passes <= counted <= 2 * passes
        assert passes < low <= high < 2 * passes


def test_work_is_that_of_all_images(planned: Callable[..., Plan]) -> None:
    plan = planned(only=("noise=mild", "alpha=2", "seed=0"))
    works = {e.run.cells[0].method: e.work for e in Estimate(plan.runs).runs}
    rounds, epochs, dealt, test = 3, 2, 360, 50
    fedavg_work, rhfl = works["fedavg"], works["rhfl"]
    assert fedavg_work is not None
    assert rhfl is not None
    assert fedavg_work.trained == rhfl.trained == rounds * epochs * dealt
    assert fedavg_work.forwarded == rounds * test
    # Ten private models are evaluated; losses and 40 public images, forward and one epoch, in the last round.
    assert rhfl.forwarded == pytest.approx(rounds * test * 10 + 1 * dealt + 10 * 40 * 4)
    assert fedavg_work.seconds(Speed(0.01, 0.001)) == pytest.approx(2160 * 0.01 + 150 * 0.001 + 30 * 0.004 + 0.5)


def test_a_method_without_cost_is_named(planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedavg, "METHOD", replace(fedavg.METHOD, cost=None))
    estimate = Estimate(planned(only=("method=fedavg",)).runs)
    assert estimate.unknown_costs == ["fedavg"]
    seconds = {e.run.identity: 3600.0 for e in estimate.runs}
    assert "  cost unknown, taken as FedAvg's: fedavg" in time_lines(estimate, seconds)


def test_relative_costs_order_runs(planned: Callable[..., Plan]) -> None:
    plan = planned(only=("noise=mild", "alpha=2", "seed=0"))
    costs = relative_costs(plan.runs)
    assert set(costs) == {run.identity for run in plan.runs}
    by_method = {run.cells[0].method: costs[run.identity] for run in plan.runs}
    assert by_method["spectral_pruning"] < by_method["fedavg"] < by_method["oct_fedsir"]
    assert by_method["all_clean"] == by_method["fedavg"]
    # Unknown images count as something.
    paper = expand(load_grid("paper"), ["task=uic", "noise=symmetric-0.6", "alpha=2", "seed=0"])
    assert all(cost > 0 for cost in relative_costs(paper.runs).values())


# Images.


def test_images_of_the_paper() -> None:
    plan = expand(load_grid("paper"), ["noise=symmetric-0.6", "alpha=2", "seed=0", "method=fedavg"])
    kermany, uic, wake_forest = (image_facts(run) for run in plan.runs)
    assert (kermany.train, kermany.test, kermany.classes) == (108_309, 1_000, ("CNV", "DME", "DRUSEN", "NORMAL"))
    assert (uic.train, uic.test, uic.classes) == (None, None, ("control", "mild", "moderate", "severe"))
    assert (wake_forest.train, wake_forest.test, wake_forest.classes) == (9_721, 1_792, ("GA", "NGA"))
    estimate = Estimate(plan.runs)
    assert estimate.unknown_images == ["uic"]
    seconds = {e.run.identity: 7200.0 for e in estimate.runs if e.work is not None}
    assert "  without 1 run of uic, whose images are not known" in time_lines(estimate, seconds)
    only_uic = Estimate(plan.runs[1:2])
    assert time_lines(only_uic, {}) == ["time: not known without the numbers of images of uic"]


def test_images_of_a_folder_are_counted(kermany_folder: Callable[..., Path]) -> None:
    given = [f"kermany.data.root={kermany_folder()}"]
    plan = expand(load_grid("paper"), ["task=kermany", "noise=symmetric-0.6", "alpha=2", "seed=0"], given)
    facts = image_facts(plan.runs[0])
    assert (facts.train, facts.test) == (12, 12)
    assert "counted" in facts.origin


@pytest.mark.parametrize(
    ("header", "cells", "expected"),
    [
        ("path,label,patient_id", ["a,x,1", "b,y,2", "c,x,3", "d,y,4", "e,x,5"], (4, 1)),
        ("path,label,patient_id,split", ["a,x,1,train", "b,y,2,val", "c,x,3,test"], (2, 1)),
        ("label", [], (0, 0)),
    ],
)
def test_images_of_a_manifest_are_counted(
    tmp_path: Path, header: str, cells: list[str], expected: tuple[int, int]
) -> None:
    manifest = tmp_path / "manifest.csv"
    manifest.write_text("\n".join([header, *cells]) + "\n", encoding="utf-8")
    given = [f"uic.data.manifest={manifest}"]
    plan = expand(load_grid("paper"), ["task=uic", "noise=symmetric-0.6", "alpha=2", "seed=0"], given)
    facts = image_facts(plan.runs[0])
    assert (facts.train, facts.test) == expected


def test_images_of_an_archive_are_counted(planned: Callable[..., Plan], tmp_path: Path) -> None:
    archive = tmp_path / "octmnist.npz"
    parts = (("train", 5), ("val", 3), ("test", 2))
    labels = {f"{part}_labels": np.zeros((n, 1), np.uint8) for part, n in parts}
    np.savez(archive, **labels, **{f"{part}_images": np.zeros((n, 8, 8), np.uint8) for part, n in parts})
    plan = planned(
        text=GRID.replace(
            "data.train_images=400, data.test_images=50, ", f"'data={{source: medmnist, path: {archive}}}', "
        )
    )
    facts = image_facts(plan.runs[0])
    assert (facts.train, facts.test) == (8, 2)


def test_images_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    given = [f"kermany.data.root={tmp_path / 'gone'}"]
    plan = expand(load_grid("paper"), ["task=kermany", "noise=symmetric-0.6", "alpha=2", "seed=0"], given)
    assert image_facts(plan.runs[0]).train is None
    assert PLACEHOLDER not in str(plan.runs[0].config.data)


# Time.


def test_workloads_of_the_paper() -> None:
    """Three networks at one image size: what a calibration has to measure."""
    estimate = Estimate(expand(load_grid("paper"), ["seed=0"]).runs)
    found = {e.workload for e in estimate.runs}
    assert {w.backbone for w in found} == {"squeezenet1_1", "shufflenet_v2_x1_0", "regnet_y_400mf"}
    assert len(found) == 3
    assert {w.image_size for w in found} == {128}


def test_calibration_measures_each_workload_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SECONDS", 0.01)
    work = Workload("tiny", 32, 3, 4, "32", 1, "cpu")
    seen: list[Workload] = []
    measure = calibration.measure

    def counted(one: Workload) -> Speed:
        seen.append(one)
        return measure(one)

    monkeypatch.setattr(calibration, "measure", counted)
    mixed = replace(work, precision="bf16-mixed")
    speeds = calibrate([work, work, mixed])
    assert seen == [work, mixed]
    assert all(0 < speed.forward < 10 and 0 < speed.step < 10 for speed in speeds.values())


def test_calibration_leaves_torch_as_it_was() -> None:
    import torch

    state = torch.random.get_rng_state()
    calibration.measure(Workload("tiny", 32, 3, 4, "32", torch.get_num_threads(), "cpu"))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_batches_are_no_larger_than_clients(planned: Callable[..., Plan]) -> None:
    config = planned("training.batch_size=64").runs[0].config
    assert workload(config, 4, 500.0).batch_size == calibration.CPU_BATCH
    assert workload(config, 4, 9.5).batch_size == 9
    assert workload(config, 4, 0.2).batch_size == 2


def test_time_and_the_costliest(planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {"cores": 64, "SLURM_CPUS_PER_TASK": 8})
    plan = planned("execution.threads=2", only=("noise=mild", "alpha=2"))
    estimate = Estimate(plan.runs)
    seconds = {run.identity: 7200.0 if run.cells[0].method == "rhfl" else 3600.0 for run in plan.runs}
    lines = time_lines(estimate, seconds)
    # 2 runs of 2 h, 14 of 1 h, on 2 of 8 cores each.
    assert lines[0] == "time: 36.0 core-hours, about 4.5 h on this machine (4 workers with 2 threads)"
    assert lines[1].startswith("  costliest: demo rhfl, 2.0 h each (2 runs); demo ")
    assert "assumes" in lines[-1]


def test_workers_of_this_machine(planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {"cores": 64, "SLURM_CPUS_PER_TASK": 8})
    for settings, expected in (
        ((), 8),
        (("execution.threads=3",), 2),
        (("execution.threads=16",), 1),
        (("execution.actors=3",), 3),
        (("execution.actors=in-process",), 1),
    ):
        assert slots(planned("execution.device=cpu", *settings).runs[0].config) == expected
    monkeypatch.setattr("experiments.checks.visible_gpus", lambda: 2)
    monkeypatch.setattr("experiments.sweeps.estimate.visible_gpus", lambda: 2)
    assert slots(planned("execution.device=cuda").runs[0].config) == 2


# Disk and memory.


def test_sizes_of_states_are_those_of_the_networks() -> None:
    for backbone, values in STATE_VALUES.items():
        weights, _ = weights_of(build_network(ModelConfig(backbone=backbone, weights="random"), 4))
        assert weights.values.size + weights.counters.size == pytest.approx(values, rel=0.01)


def test_the_record_of_a_run_fits_into_what_is_expected(fedsir: Any, tmp_path: Path, written: Any) -> None:
    ended = fedsir.tiny_run("work_dir=here", "tracking.uri=sqlite:///record/mlflow.db")
    assert ended.code == 0
    files = [path for path in (tmp_path / "record" / "artifacts").rglob("*") if path.is_file()]
    text = GRID.replace("training.rounds=3", "training.rounds=2").replace("train_images=400", "train_images=160")
    plan = expand(load_grid(written(text)), ["noise=mild", "alpha=2", "seed=0", "method=oct_fedsir"])
    expected = Estimate(plan.runs).record_bytes()
    assert 0.2 * expected < sum(path.stat().st_size for path in files) <= expected


def test_too_little_disk_and_memory_are_warned_of(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = planned("execution.threads=1")
    estimate, tracking = Estimate(plan.runs), plan.runs[0].config.tracking
    assert disk_line(estimate, tracking)[1] is None
    line, warning = disk_line(estimate, tracking.model_copy(update={"uri": "http://localhost:5000"}))
    assert warning is None
    assert "free" not in line
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000})())
    line, warning = disk_line(estimate, tracking)
    assert "1.0 MB free" in line
    assert warning is not None
    assert "has 1.0 MB left" in warning
    machine(monkeypatch, {"cores": 2}, {"memory": 2**40, "cgroup limit": 40_960_000})
    line, warning = memory_line(estimate)
    assert "of 41 MB" in line
    assert warning is not None
    assert "only 41 MB may be used" in warning


def test_images_beyond_the_object_store_are_warned_of(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, {"cores": 1}, {"memory": 2_048_000_000})
    estimate = Estimate(planned("data.train_images=190000").runs)
    _, warning = memory_line(estimate)
    assert warning is not None
    assert "object store usually holds" in warning


# What cannot work.

FAULTS = [
    (("federation.partition.min_client_size=37",), "10 clients with federation.partition.min_client_size 37 need 370"),
    (("federation.public_pool=400",), "federation.public_pool is 400, but there are only 400 training images"),
    (("federation.noise.label_map=wake_forest",), "class 'GA' is not one of this data set's classes"),
    (("model.weights=gone.pth",), "model.weights: no such file: gone.pth"),
    (("model.weights=imagenet",), "no ImageNet weights for the backbone tiny"),
    (("model.backbone=squeezenet1_1",), "phantom-pretext exists only for the backbone tiny"),
    (
        ("model.backbone=squeezenet1_1", "model.weights=random", "data.image_size=16"),
        "the backbone squeezenet1_1 needs 32 or more",
    ),
    (("execution.device=cuda",), "torch sees no GPU"),
]


@pytest.mark.parametrize(("settings", "message"), FAULTS, ids=[f[0][0] for f in FAULTS])
def test_what_cannot_work_is_found(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("experiments.checks.visible_gpus", lambda: 0)
    good, bad = planned(), planned(*settings)
    assert find_faults(good, Estimate(good.runs)) == []
    (fault,) = find_faults(bad, Estimate(bad.runs))
    assert message in fault


def test_a_fault_of_some_runs_says_of_how_many(planned: Callable[..., Plan]) -> None:
    plan = planned("severe.federation.noise.label_map=wake_forest")
    (fault,) = find_faults(plan, Estimate(plan.runs))
    assert fault.endswith("(28 of 60 runs)")


def test_weights_that_are_there_are_no_fault(planned: Callable[..., Plan], tmp_path: Path) -> None:
    (tmp_path / "weights.pth").touch()
    plan = planned(f"model.weights={tmp_path}/weights.pth")
    assert find_faults(plan, Estimate(plan.runs)) == []


# The command.


def test_plan_of_a_grid_that_can_run(fedsir: Any, written: Callable[[str], str]) -> None:
    ended = fedsir.call("sweep", "plan", written(GRID))
    assert (ended.code, ended.err) == (0, "")
    for words in (
        "distinct runs: 60 for 64 results",
        "done once: 12 federations, 1 set of images decoded, 24 stages I for 40 runs",
        "images of demo: 400 to train on, 50 to test on (phantoms)",
        "give --calibrate",
        "disk: about ",
        "memory: about ",
    ):
        assert words in ended.out
    assert "It cannot work" not in ended.out


def test_plan_of_a_grid_that_cannot_run(fedsir: Any, written: Callable[[str], str]) -> None:
    ended = fedsir.call("sweep", "plan", written(GRID), "--set", "federation.public_pool=399")
    assert (ended.code, ended.err) == (1, "")
    assert "It cannot work:" in ended.out
    assert "demo: 10 clients with federation.partition.min_client_size" in ended.out


def test_absent_images_are_a_reason(fedsir: Any, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    ended = fedsir.call("sweep", "plan", "paper", "--only", "task=kermany", "--set", f"kermany.data.root={gone}")
    assert ended.code == 1
    assert f"data.root = {gone}: there is no such file or folder" in ended.out


def test_plan_with_calibration(fedsir: Any, written: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure", lambda _: Speed(step=0.01, forward=0.002))
    ended = fedsir.call("sweep", "plan", written(GRID), "--calibrate", "--set", "execution.device=cpu")
    assert ended.code == 0
    assert re.search(r"time: [\d.]+ core-hours, about .* on this machine \(\d+ workers? with 1 thread\)", ended.out)
    assert "costliest: demo " in ended.out
    assert re.search(r"│ oct_fedsir/no_kd +│ +[\d.]+ (s|min) │", ended.out)


HEAVY = ("lightning", "torchvision", "torchmetrics", "scipy", "ray", "mlflow", "sklearn", "pandas")
SCRIPT = f"""
import sys
from experiments import cli
sys.argv = ["fedsir", "sweep", "plan", "rehearsal"]
try:
    cli.main()
except SystemExit as end:
    assert not end.code, end.code
print("heavy:", *(name for name in {HEAVY!r} if name in sys.modules))
"""


def test_a_plan_loads_only_what_it_needs() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1].split() == ["heavy:"]


def test_a_path_in_a_clone_is_the_shipped_grid() -> None:
    path = Path(__file__).parents[2] / "experiments" / "rehearsal.yaml"
    only = ["noise=symmetric-0.6", "method=fedavg"]
    assert expand(load_grid(str(path)), only).runs == expand(load_grid("rehearsal"), only).runs


# Words.


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (89, "89 s"),
        (90, "2 min"),
        (5399, "90 min"),
        (5400, "1.5 h"),
        (200_000, "2.3 days"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 kB"), (45_300, "45 kB"), (1_720_000, "1.7 MB"), (47e9, "47 GB"), (2.5e12, "2.5 TB"), (1.2e15, "1,200 TB")],
)
def test_sizes(number: float, words: str) -> None:
    assert size(number) == words


def test_numbers_of_things() -> None:
    assert [many(n, "run") for n in (0, 1, 4212)] == ["0 runs", "1 run", "4212 runs"]
