"""Grid files: how they expand, what is shared, what is refused, and the grids that are shipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.compare import ALL_CLEAN, variant
from experiments.config import load_run_file
from experiments.expansion import Cell, absent_files, choose, expand, parse_shard, require_complete
from experiments.grid import grids, load_grid
from fedsir.config.data import PhantomData
from fedsir.errors import BadInput
from fedsir.methods.registry import BUILT_IN

GRID = """
name: small
base: demo
set: [training.rounds=3]
axes:
  noise:
    - {label: mild, set: [federation.noise.type=symmetric, federation.noise.ratio=0.3]}
    - {label: severe, set: [federation.noise.type=asymmetric, federation.noise.ratio=0.9]}
  alpha: {key: federation.partition.alpha, values: [2.0, 0.5]}
  training.local_epochs: [1, 2]
exclude:
  - {noise: severe, alpha: 0.50}
methods: [oct_fedsir, oct_fedsir/no_kd, fedsir, all_clean]
seeds: [4, 1]
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "grid.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_every_cell_is_resolved(written: Callable[[str], str]) -> None:
    plan = expand(load_grid(written(GRID)))
    conditions = {("mild", "2"), ("mild", "0.5"), ("severe", "2")}
    wanted = {
        Cell((noise, alpha, epochs), method, seed)
        for noise, alpha in conditions
        for epochs in ("1", "2")
        for method in ("oct_fedsir", "oct_fedsir/no_kd", "fedsir", ALL_CLEAN)
        for seed in (4, 1)
    }
    assert Counter(plan.cells) == Counter(wanted)
    for run in plan.runs:
        noise, alpha, epochs = run.cells[0].condition
        config = run.config
        assert config.federation.partition.alpha == float(alpha)
        assert (config.training.local_epochs, config.training.rounds) == (int(epochs), 3)
        assert run.identity == config.identity()
        if run.cells[0].method == ALL_CLEAN:
            assert (config.method.label, config.federation.noise.type) == ("fedavg", "none")
        else:
            assert config.method.label == run.cells[0].method
            assert config.federation.noise.ratio == {"mild": 0.3, "severe": 0.9}[noise]
        assert all(config.seed == cell.seed for cell in run.cells)


def test_runs_are_those_of_compare(written: Callable[[str], str]) -> None:
    """So that results of both commands are one record, settings of a family included."""
    plan = expand(load_grid(written(GRID)), ["noise=severe", "training.local_epochs=2"])
    overrides = [
        "training.rounds=3",
        "federation.noise.type=asymmetric",
        "federation.noise.ratio=0.9",
        "federation.partition.alpha=2.0",
        "training.local_epochs=2",
    ]
    base = load_run_file("demo", overrides)
    assert len(plan.runs) == 8
    for run in plan.runs:
        cell = run.cells[0]
        expected = variant("demo", overrides, base, cell.method, cell.seed)
        assert run.config.model_copy(update={"name": "demo"}) == expected
        assert run.identity == expected.identity()


def test_settings_of_one_method_concern_no_other(written: Callable[[str], str]) -> None:
    text = GRID.replace("[training.rounds=3]", "[training.rounds=3, fedsir.method.identification.regularization=0.01]")
    given = ["oct_fedsir/no_kd.method.relabeling.every=9"]
    plan, plain = expand(load_grid(written(text)), [], given), expand(load_grid(written(GRID)))
    identities = {run.label: run.identity for run in plain.runs}
    changed = {run.cells[0].method for run in plan.runs if run.identity != identities[run.label]}
    assert changed == {"fedsir", "oct_fedsir/no_kd"}
    for run in plan.runs:
        settings = run.config.method.model_dump()
        if run.cells[0].method == "fedsir":
            assert settings["identification"]["regularization"] == 0.01
        if run.cells[0].method == "oct_fedsir/no_kd":
            assert settings["relabeling"]["every"] == 9


@pytest.mark.parametrize("override", ["fedsir.training.rounds=9", "oct_fedsir.federation.noise.ratio=0.1"])
def test_one_method_cannot_have_other_data_or_budget(written: Callable[[str], str], override: str) -> None:
    with pytest.raises(BadInput, match="all methods share data, noise and budget"):
        expand(load_grid(written(GRID)), [], [override])


@pytest.mark.parametrize("key", ["fedsir.method.name=fedavg", "oct_fedsir.method.preset=no_kd"])
def test_a_method_cannot_become_another_one(written: Callable[[str], str], key: str) -> None:
    with pytest.raises(BadInput, match="would be those of another method"):
        expand(load_grid(written(GRID)), [], [key])


def test_labels_of_axes_are_no_methods(written: Callable[[str], str]) -> None:
    with pytest.raises(BadInput, match="'fedsir' is a method"):
        load_grid(written(GRID.replace("label: mild", "label: fedsir")))


def test_all_clean_is_one_run_for_all_noise(written: Callable[[str], str]) -> None:
    plan = expand(load_grid(written(GRID)), ["method=all_clean", "alpha=2"])
    assert len(plan.runs) == 4
    for run in plan.runs:
        assert {cell.condition[0] for cell in run.cells} == {"mild", "severe"}
        assert len({(cell.condition[2], cell.seed) for cell in run.cells}) == 1
        assert run.config.name == f"small-clean-2-{run.cells[0].condition[2]}"
        assert "mild" not in run.label


def test_names_that_mean_the_same_run_are_one_run(written: Callable[[str], str]) -> None:
    text = """
name: twice
base: demo
axes: {map: [{label: with, set: ["federation.noise.label_map=kermany"]}, {label: again, set: [seed=3]}]}
methods: [fedavg]
seeds: [0]
"""
    plan = expand(load_grid(written(text)))
    (run,) = plan.runs
    assert [cell.condition for cell in run.cells] == [("with",), ("again",)]


def test_runs_of_a_condition_and_seed_come_together_those_without_noise_last(written: Callable[[str], str]) -> None:
    plan = expand(load_grid(written(GRID)))
    groups = [run.group for run in plan.runs]
    assert groups == sorted(groups)
    for group in set(groups):
        runs = [run for run in plan.runs if run.group == group]
        noisy = [run for run in runs if run.cells[0].method != ALL_CLEAN]
        assert runs[: len(noisy)] == noisy
        assert len({run.config.condition_identity() for run in noisy}) == 1


def test_shards_share_out_whole_groups(written: Callable[[str], str]) -> None:
    plan = expand(load_grid(written(GRID)))
    parts = [plan.shard(number, 5) for number in range(1, 6)]
    identities = [run.identity for part in parts for run in part.runs]
    assert Counter(identities) == Counter(run.identity for run in plan.runs)
    of_group = [{run.group for run in part.runs} for part in parts]
    assert sum(map(len, of_group)) == len(set().union(*of_group))


def test_order_of_overrides(written: Callable[[str], str]) -> None:
    """Axes win over `set`, the command line over both, and what names a label over the rest."""
    text = GRID.replace("training.rounds=3", "training.rounds=3, federation.noise.ratio=0.1")
    grid = load_grid(written(text))
    plan = expand(grid, overrides=["training.rounds=5", "severe.training.rounds=7", "0.5.training.batch_size=8"])
    for run in plan.runs:
        if run.cells[0].method == ALL_CLEAN:
            continue
        noise, alpha, _ = run.cells[0].condition
        assert run.config.federation.noise.ratio == {"mild": 0.3, "severe": 0.9}[noise]
        assert run.config.training.rounds == {"mild": 5, "severe": 7}[noise]
        assert run.config.training.batch_size == {"2": 16, "0.5": 8}[alpha]


def test_choosing(written: Callable[[str], str]) -> None:
    grid = load_grid(written(GRID))
    chosen = choose(grid, ["alpha=0.50", "method=fedsir", "method=all_clean", "seed=1"])
    assert chosen["alpha"] == ("0.5",)
    assert chosen["method"] == ("fedsir", ALL_CLEAN)
    assert chosen["seed"] == ("1",)
    assert chosen["noise"] == ("mild", "severe")


def test_base_may_be_a_file_beside_the_grid(written: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {source: phantom, train_images: 123}\nmethod: oct_fedsir\n")
    plan = expand(load_grid(written(GRID.replace("base: demo", "base: mine.yaml"))), ["noise=mild"])
    data = plan.runs[0].config.data
    assert isinstance(data, PhantomData)
    assert data.train_images == 123


def test_nothing_left_is_refused(written: Callable[[str], str]) -> None:
    with pytest.raises(BadInput, match="nothing is left to run"):
        expand(load_grid(written(GRID)), ["noise=severe", "alpha=0.5"])


FAULTS = [
    ("name: small", "name: small\naxis: {}", ("axis: unknown key", "Did you mean axes?")),
    ("name: small", "", ("name: must be given",)),
    ("base: demo", "", ("base: give it once", "rehearsal_kermany")),
    ("base: demo", "base: demmo", ("no such configuration: demmo", "Did you mean the preset demo?")),
    ("alpha: {key: federation.partition.alpha, values: [2.0, 0.5]}", "alpha: 2.0", ("axes.alpha", "2.0")),
    ("values: [2.0, 0.5]", "value: [2.0]", ("axes.alpha", "{key: section.key, values: [...]}")),
    ("values: [2.0, 0.5]", "values: []", ("axes.alpha", "at least one value")),
    ("values: [2.0, 0.5]", "values: [2.0, [0.5]]", ("axes.alpha", "value 2")),
    ("values: [2.0, 0.5]", "values: [2.0, 2]", ("axes.alpha", "'2' is there twice")),
    ("values: [2.0, 0.5]", "values: [-1.0, 0.5]", ("-1", "federation.partition.alpha")),
    ("label: mild, set", "lable: mild, set", ("axes.noise (value 1), lable: unknown key", "Did you mean label?")),
    ("label: mild", "label: training.x", ("axes.noise", "'training.x' is a key of run files")),
    (
        "federation.noise.ratio=0.3",
        "federation.noise.rato=0.3",
        ("condition mild, 2, 1", "federation.noise.rato: unknown key"),
    ),
    ("federation.noise.ratio=0.3", "ratio", ("condition mild, 2, 1", "ratio: expected section.key=value")),
    ("{noise: severe, alpha: 0.50}", "{noise: sever}", ("exclude, item 1", "'sever'", "Did you mean severe?")),
    ("{noise: severe, alpha: 0.50}", "{nois: severe}", ("exclude, item 1", "'nois'", "Did you mean noise?")),
    ("  - {noise: severe, alpha: 0.50}", "  - severe", ("exclude: item 1",)),
    ("fedsir, all_clean", "fedsr, all_clean", ("methods", "'fedsr'", "Did you mean fedsir?")),
    ("no_kd", "no_kdd", ("no preset 'no_kdd'", "Did you mean no_kd?")),
    ("fedsir, all_clean", "fedsir, fedsir", ("methods: name each method once",)),
    ("seeds: [4, 1]", "seeds: [4, 4]", ("seeds: give each seed once",)),
    ("seeds: [4, 1]", "seeds: [-4]", ("seeds", "-4", "at least 0")),
    ("seeds: [4, 1]", "seeds: []", ("seeds",)),
    ("  training.local_epochs:", "  seed:", ("axes.seed", "`seeds`")),
]


@pytest.mark.parametrize(("old", "new", "parts"), FAULTS, ids=[f[1] or f"no {f[0]}" for f in FAULTS])
def test_faults_are_named(written: Callable[[str], str], old: str, new: str, parts: tuple[str, ...]) -> None:
    assert old in GRID
    with pytest.raises(BadInput) as caught:
        expand(load_grid(written(GRID.replace(old, new))))
    for part in parts:
        assert part in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 8


@pytest.mark.parametrize(
    ("only", "parts"),
    [
        ("alpha", ("expected axis=value", "noise, alpha")),
        ("alfa=2", ("no axis 'alfa'", "Did you mean alpha?")),
        ("alpha=3", ("no value '3'", "2, 0.5")),
        ("method=fedavg", ("no value 'fedavg'",)),
        ("seed=2", ("no value '2'", "4, 1")),
    ],
)
def test_unknown_choices_are_refused(written: Callable[[str], str], only: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(BadInput) as caught:
        choose(load_grid(written(GRID)), [only])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["2", "0/2", "3/2", "1/0", "a/b", "1/2/3", ""])
def test_impossible_shards_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="expected part/parts"):
        parse_shard(text)


def test_unknown_grid_is_refused() -> None:
    with pytest.raises(BadInput, match="Did you mean the grid quickstart"):
        load_grid("quikstart")


# name: (conditions, methods, seeds, runs of methods, all-clean results, distinct runs)
SHIPPED = {
    "ablation": (12, 5, 3, 180, 0, 180),
    "paper": (117, 12, 3, 4212, 351, 4212 + 27),
    "quickstart": (2, 2, 1, 4, 2, 5),
    "rehearsal": (117, 12, 1, 1404, 117, 1404 + 9),
}


def test_every_shipped_grid_is_known_here() -> None:
    assert grids() == sorted(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_counts_of_shipped_grids(name: str) -> None:
    plan = expand(load_grid(name))
    cells = Counter((cell.condition, cell.method, cell.seed) for cell in plan.cells)
    assert set(cells.values()) == {1}
    noisy = [cell for cell in plan.cells if cell.method != ALL_CLEAN]
    found = (
        len({cell.condition for cell in noisy}),
        len({cell.method for cell in noisy}),
        len({cell.seed for cell in noisy}),
        len(noisy),
        len(plan.cells) - len(noisy),
        len(plan.runs),
    )
    assert found == SHIPPED[name]
    assert len({run.identity for run in plan.runs}) == len(plan.runs)
    assert {run.config.tracking.experiment for run in plan.runs} == {name}


@pytest.mark.parametrize("name", ["paper", "rehearsal"])
def test_the_papers_conditions(name: str) -> None:
    plan = expand(load_grid(name), ["seed=0"])
    noisy = [run for run in plan.runs if run.cells[0].method != ALL_CLEAN]
    assert {run.cells[0].method for run in noisy} == set(BUILT_IN)
    found = {
        (
            run.config.federation.clients,
            run.config.federation.noise.type,
            run.config.federation.noise.ratio,
            run.config.federation.partition.alpha,
        )
        for run in noisy
    }
    noise = [("symmetric", r / 10) for r in range(3, 10)] + [("asymmetric", r / 10) for r in range(4, 10)]
    assert found == {(k, *setting, alpha) for k in (30, 20, 5) for setting in noise for alpha in (2.0, 0.5, 0.1)}


def test_the_paper_has_the_papers_budget() -> None:
    plan = expand(load_grid("paper"), ["noise=symmetric-0.6", "seed=0"])
    for run in plan.runs:
        training = run.config.training
        assert (training.rounds, training.local_epochs, training.batch_size) == (100, 1, 128)
        assert run.config.data.image_size == 128


def test_the_paper_needs_images_of_each_task() -> None:
    plan = expand(load_grid("paper"), ["noise=symmetric-0.6", "method=fedavg", "seed=0"])
    assert plan.missing == ["kermany.data.root", "uic.data.manifest", "wake_forest.data.manifest"]
    with pytest.raises(BadInput, match=r"--set kermany\.data\.root=VALUE"):
        require_complete(plan)


def test_one_task_of_the_paper_needs_only_its_own_images(tmp_path: Path) -> None:
    given = [f"kermany.data.root={tmp_path}"]
    plan = expand(load_grid("paper"), ["task=kermany", "noise=symmetric-0.6", "method=fedavg"], given)
    require_complete(plan)
    assert plan.missing == []
    assert absent_files(plan) == []
    gone = expand(load_grid("paper"), ["task=kermany"], [f"kermany.data.root={tmp_path}/gone"])
    (fault,) = absent_files(gone)
    assert f"{tmp_path}/gone" in fault


def test_every_condition_of_the_rehearsal_has_a_federation() -> None:
    """A partition that is impossible would be found only when the sweep comes to it."""
    from fedsir.data.load import load_dataset
    from fedsir.federation.build import build_federation

    plan = expand(load_grid("rehearsal"), ["method=fedavg", "noise=symmetric-0.3", "noise=asymmetric-0.9"])
    datasets = {run.config.data: load_dataset(run.config.data, None) for run in plan.runs}
    assert len(plan.runs) == 18
    for run in plan.runs:
        dataset = datasets[run.config.data]
        federation, truth, _ = build_federation(
            dataset.train.labels, dataset.train.patients, dataset.class_names, run.config.federation, run.config.seed
        )
        assert federation.num_clients == run.config.federation.clients
        assert truth.noisy.any()
        assert not truth.noisy.all()
