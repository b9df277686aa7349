"""Run files: presets, overrides, the printed configuration, and the runs that `compare` makes of one file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.compare import ALL_CLEAN, parse_seeds, variant
from experiments.config import load_execution, load_run_file, presets
from fedsir.config.data import CohortData, KermanyData
from fedsir.errors import BadInput

NEEDED = {
    "demo": [],
    "kermany": ["data.root=/data/OCT2017"],
    "rehearsal_kermany": [],
    "rehearsal_uic": [],
    "rehearsal_wake_forest": [],
    "uic": ["data.manifest=/data/uic.csv"],
    "wake_forest": ["data.manifest=/data/wf.csv"],
}


def test_every_preset_is_known_here() -> None:
    assert list(presets()) == sorted(NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_preset_loads_once_its_missing_value_is_given(name: str) -> None:
    config = load_run_file(name, NEEDED[name])
    assert config.name == name
    assert config.method.name == "oct_fedsir"


@pytest.mark.parametrize("name", NEEDED)
def test_where_a_run_executes_is_known_without_its_method(name: str) -> None:
    given = [*NEEDED[name], "execution.threads=2", "training.participation=0.5", "method.name=fedavg"]
    assert load_execution(name, given) == load_run_file(name, given).execution


@pytest.mark.parametrize(
    "wrong", ["method.name=fedavgg", "method.name=nothing/no_kd", "execution.thread=2", "data.kind=9", "seed=", "a"]
)
def test_what_else_is_wrong_is_said_in_the_same_words(wrong: str) -> None:
    with pytest.raises(BadInput) as late:
        load_run_file("demo", [wrong])
    with pytest.raises(BadInput) as early:
        load_execution("demo", [wrong])
    assert str(early.value) == str(late.value)


def test_where_a_run_executes_is_known_without_torch() -> None:
    script = (
        "import sys; from experiments.config import load_execution; "
        "print(load_execution('demo', ['execution.threads=2']).threads, 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["2", "False"]


# (K clients, K_c clean, backbone, label map) of the paper's three tasks.
@pytest.mark.parametrize(
    ("name", "clients", "clean", "backbone", "label_map"),
    [
        ("kermany", 30, 3, "squeezenet1_1", "kermany"),
        ("uic", 20, 2, "shufflenet_v2_x1_0", "uic_up"),
        ("wake_forest", 5, 1, "regnet_y_400mf", "wake_forest"),
    ],
)
def test_presets_hold_the_papers_values(name: str, clients: int, clean: int, backbone: str, label_map: str) -> None:
    config = load_run_file(name, NEEDED[name])
    assert (config.federation.clients, config.federation.clean_clients) == (clients, clean)
    assert config.federation.noise.label_map == label_map
    assert (config.model.backbone, config.model.weights) == (backbone, "imagenet")
    assert (config.training.rounds, config.training.batch_size, config.training.local_epochs) == (100, 128, 1)
    assert config.training.optimizer.lr == 3e-4
    assert config.training.optimizer.weight_decay == 5e-4
    assert config.data.image_size == 128
    assert (config.data.transform.mean, config.data.transform.std) == (0.5, 0.5)


def test_preset_classes() -> None:
    assert isinstance(load_run_file("kermany", NEEDED["kermany"]).data, KermanyData)
    uic, forest = (load_run_file(n, NEEDED[n]).data for n in ("uic", "wake_forest"))
    assert isinstance(uic, CohortData)
    assert isinstance(forest, CohortData)
    assert uic.classes is not None
    assert list(uic.classes) == ["control", "mild", "moderate", "severe"]
    assert forest.classes == {"GA": ("GA", "CGA", "NCGA"), "NGA": ("NGA",)}


@pytest.mark.parametrize("name", NEEDED)
def test_printed_configuration_is_the_same_run(fedsir: Any, tmp_path: Path, name: str) -> None:
    overrides = [*NEEDED[name], "seed=7", "federation.noise.ratio=0.35", "method.logit_adjustment.eps=1e-9"]
    argv = [word for o in overrides for word in ("--set", o)]
    ended = fedsir.call("run", name, *argv, "--print-config")
    assert (ended.code, ended.err) == (0, "")
    file = tmp_path / "again.yaml"
    file.write_text(ended.out, encoding="utf-8")
    again, first = load_run_file(str(file), []), load_run_file(name, overrides)
    assert again == first
    assert again.identity() == first.identity()
    assert fedsir.call("run", str(file), "--print-config").out == ended.out
    assert not (tmp_path / "fedsir-runs").exists()


def test_identity_ignores_where_a_run_executes_and_is_recorded() -> None:
    base = load_run_file("demo", []).identity()
    tracking = ("experiment=x", "figures=false", "weights=false", "flush_seconds=0.0")
    same_result = ("execution.actors=in-process", "work_dir=elsewhere", "name=other")
    for same in (*same_result, *(f"tracking.{setting}" for setting in tracking)):
        assert load_run_file("demo", [same]).identity() == base
    for other in ("seed=1", "execution.threads=2", "data.image_size=32", "method.relabeling.every=6"):
        assert load_run_file("demo", [other]).identity() != base


def test_numbers_in_exponent_notation_are_numbers() -> None:
    assert load_run_file("demo", ["training.optimizer.lr=3e-4"]).training.optimizer.lr == 3e-4


def test_naming_another_method_drops_the_settings_of_the_first() -> None:
    assert load_run_file("demo", ["method.name=fedavg"]).method.model_dump() == {"name": "fedavg", "preset": None}
    assert load_run_file("demo", ["method=fedavg"]).method.model_dump() == {"name": "fedavg", "preset": None}


def test_method_given_as_a_word_takes_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {source: phantom}\nmethod: oct_fedsir\n")
    config = load_run_file(str(file), ["method.relabeling.every=3"])
    assert config.method.model_dump()["relabeling"]["every"] == 3


def _variants(overrides: list[str], *methods: str) -> list[Any]:
    base = load_run_file("demo", overrides)
    return [variant("demo", overrides, base, method, 4) for method in methods]


def test_variants_share_everything_but_method_and_seed() -> None:
    overrides = ["federation.noise.ratio=0.3", "method.relabeling.every=5"]
    ours, fedavg = _variants(overrides, "oct_fedsir", "fedavg")
    left, right = (c.model_dump(exclude={"method"}) for c in (ours, fedavg))
    assert left == right
    assert left["seed"] == 4
    assert ours.method.relabeling.every == 5
    assert fedavg.method.model_dump() == {"name": "fedavg", "preset": None}


def test_settings_of_the_file_survive_when_another_method_is_configured() -> None:
    """`--set method.name=fedavg` must not take away what the demo sets for OCT-FedSIR."""
    (ours,) = _variants(["method.name=fedavg"], "oct_fedsir")
    assert ours.method == load_run_file("demo", []).method


def test_presets_of_a_method_differ_from_it_by_nothing_else() -> None:
    """An ablation must not lose what the file and the command line set for its method."""
    ours, ablated = _variants(["method.relabeling.every=7"], "oct_fedsir", "oct_fedsir/no_kd")
    assert (ours.method.label, ablated.method.label) == ("oct_fedsir", "oct_fedsir/no_kd")
    assert ablated.method.stage_one == load_run_file("demo", []).method.stage_one  # type: ignore[attr-defined]
    assert ablated.method.relabeling.every == 7
    assert (ours.method.distillation.enabled, ablated.method.distillation.enabled) == (True, False)
    left, right = (m.method.model_dump(exclude={"preset", "distillation"}) for m in (ours, ablated))
    assert left == right


@pytest.mark.parametrize("named", ["method.preset=no_kd", "method.name=oct_fedsir/no_kd", "method=oct_fedsir/no_kd"])
def test_a_label_means_what_it_says_whatever_the_file_names(named: str) -> None:
    plain, without_kd, without_la = _variants([named], "oct_fedsir", "oct_fedsir/no_kd", "oct_fedsir/no_la")
    assert [m.method.label for m in (plain, without_kd, without_la)] == [
        "oct_fedsir", "oct_fedsir/no_kd", "oct_fedsir/no_la"
    ]  # fmt: skip
    assert [m.method.distillation.enabled for m in (plain, without_kd, without_la)] == [True, False, True]
    assert [m.method.logit_adjustment.stage_one for m in (plain, without_kd, without_la)] == [True, True, False]


def test_what_a_preset_is_about_wins_over_the_file() -> None:
    """As in a file from --print-config, which has a value for everything."""
    spelled_out = ["method.distillation.enabled=true", "method.identification.regularization=0.01"]
    without_kd, paper = _variants(spelled_out, "oct_fedsir/no_kd", "oct_fedsir/paper")
    assert not without_kd.method.distillation.enabled
    assert paper.method.identification.regularization == 1e-6


def test_the_family_shares_how_stage_one_trains_and_when_labels_are_corrected() -> None:
    """Images and budget decide these, so a comparison in which only one method has them would be unfair."""
    overrides = ["method.relabeling.every=7", "method.relabeling.rule=sr", "method.stage_one.lr=1e-3"]
    ours, fedsir, pruning = _variants(overrides, "oct_fedsir", "fedsir", "spectral_pruning")
    assert {m.method.stage_one.lr for m in (ours, fedsir, pruning)} == {1e-3}
    assert {m.method.stage_one.batch_size for m in (ours, fedsir, pruning)} == {32}
    assert (fedsir.method.relabeling.every, fedsir.method.relabeling.first) == (7, 1)
    # What makes them different methods stays different.
    assert (ours.method.relabeling.rule, fedsir.method.relabeling.rule) == ("sr", "agree")
    assert fedsir.method.stage_one.transform == "train"
    assert not fedsir.method.identification.balance


def test_naming_a_preset_keeps_the_settings_of_its_method() -> None:
    chosen = load_run_file("demo", ["method.name=oct_fedsir/equal_steps"]).method
    expected = load_run_file("demo", ["method.stage_one.length=steps"]).method
    assert chosen.label == "oct_fedsir/equal_steps"
    assert chosen.model_dump(exclude={"preset"}) == expected.model_dump(exclude={"preset"})


def test_all_clean_is_fedavg_without_noise() -> None:
    (clean,) = _variants(["method.relabeling.every=5"], ALL_CLEAN)
    assert clean.method.name == "fedavg"
    assert clean.federation.noise.type == "none"


def test_all_clean_does_not_depend_on_the_noise_that_it_lacks() -> None:
    (mild,), (severe,) = (
        _variants([f"federation.noise={{type: {kind}, ratio: {ratio}, label_map: kermany}}"], ALL_CLEAN)
        for kind, ratio in (("symmetric", 0.3), ("asymmetric", 0.9))
    )
    assert mild.identity() == severe.identity()


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20, unique=True))
def test_seeds_as_a_list_are_read_as_written(seeds: list[int]) -> None:
    assert parse_seeds(",".join(map(str, seeds))) == seeds


@given(st.integers(0, 10**6), st.integers(0, 999))
def test_seed_ranges_include_both_ends(first: int, more: int) -> None:
    assert parse_seeds(f"{first}-{first + more}") == list(range(first, first + more + 1))


@given(st.text(max_size=12))
def test_any_text_for_seeds_is_read_or_refused(text: str) -> None:
    try:
        seeds = parse_seeds(text)
    except BadInput:
        return
    assert seeds
    assert all(s >= 0 for s in seeds)
    assert len(set(seeds)) == len(seeds)
