"""Bad inputs end with exit code 2 and a few lines, before anything needs Ray and with nothing recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.claims import claim_run
from experiments.config import load_run_file

MAX_LINES = 8


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        pytest.fail("workers were started for an input that is bad")

    monkeypatch.setattr("ray.init", started)
    # Beside the look at the input.
    monkeypatch.setattr("fedsir.clients.ray_ahead.start_ray", lambda _: None)


@pytest.fixture
def refused(fedsir: Any, store: str, recorded_runs: Callable[[str], int]) -> Callable[..., str]:
    """Run a command that must be refused; its message, with every part of `parts` in it."""
    # Other modules share the store.
    before = recorded_runs(store)

    def check(argv: list[str], *parts: str) -> str:
        ended = fedsir.call(*argv)
        assert ended.code == 2, ended
        assert ended.err.startswith("fedsir: ")
        assert "Traceback" not in ended.out + ended.err
        assert len(ended.err.splitlines()) <= MAX_LINES
        for part in parts:
            assert part in ended.err
        assert recorded_runs(store) == before
        return str(ended.err)

    return check


@pytest.fixture
def refused_run(refused: Callable[..., str], fedsir: Any, store: str) -> Callable[..., str]:
    """Refuse the tiny demo with one more setting."""

    def check(setting: str, *parts: str, more: tuple[str, ...] = ()) -> str:
        base = ("execution.actors=2", f"tracking.uri={store}")
        return refused(["run", "demo", *fedsir.tiny_options(*base, *more, setting)], *parts)

    return check


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("federation.noise.rato=0.5", ("federation.noise.rato: unknown key", "Did you mean ratio?")),
        ("federated.clients=3", ("federated: unknown key", "Did you mean federation?")),
        ("data.train_image=5", ("data.train_image: unknown key", "train_images")),
        ("method.relabel.every=5", ("oct_fedsir", "method.relabel: unknown key", "relabeling")),
        ("method.relabeling.evry=5", ("method.relabeling.evry: unknown key", "Did you mean every?")),
        ("tracking.url=x", ("tracking.url: unknown key", "uri")),
        ("federation.noise.ratio=1.4", ("federation.noise.ratio = 1.4", "at most 1")),
        ("federation.noise.ratio=high", ('federation.noise.ratio = "high"', "a number")),
        ("federation.noise.ratio=.nan", ("federation.noise.ratio", "finite")),
        ("federation.partition.alpha=0", ("federation.partition.alpha = 0", "more than 0")),
        ("federation.clean_clients=9", ("clean_clients is 9", "4 clients")),
        ("federation.clients=500", ("500 clients", "there are 159", "Remedy")),
        ("training.rounds=0", ("training.rounds = 0", "more than 0")),
        ("training.rounds=true", ("training.rounds = true", "whole number")),
        ('training.rounds="3"', ('training.rounds = "3"', "whole number")),
        ("training.rounds=", ("training.rounds = null", "whole number")),
        ("training=[1]", ("training = [1]", "section")),
        ("seed=-1", ("seed = -1", "at least 0")),
        ("seed.x=3", ('seed = {"x": 3}', "whole number")),
        ("execution.actors=many", ("execution.actors", "whole number, or 'auto', 'per-client' or 'in-process'")),
        ("execution.actors=0", ("execution.actors = 0", "more than 0, or 'auto'")),
        ("data.transform.std=0", ("data.transform.std = 0", "more than 0")),
        ("data.transform.mean=[1, 2]", ("data.transform.mean = [1, 2]", "item 3")),
        ("data.source=kermani", ("data.source", "kermani", "Did you mean kermany?")),
        ("data.image_size=8", ("data.image_size is 8", "Set it to")),
        ("method.name=fedavgg", ("fedavgg", "Did you mean fedavg?", "Known:")),
        ("method=[1]", ("method = [1]", "--set method.name=")),
        ("method=oct_fedsir/no_kf", ("oct_fedsir has no preset 'no_kf'", "Did you mean no_kd?", "Known:")),
        ("method.name=fedavg/fast", ("fedavg has no preset 'fast'", "Known: none.")),
        ("method=oct_fedsir/", ("oct_fedsir has no preset ''", "Known: equal_steps")),
        ("method.distillation.weight.kind=const", ("method.distillation.weight.kind", "Did you mean constant?")),
        ("method.distillation.weight={kind: constant}", ("method.distillation.weight.value: must be given",)),
        ("model.weights=/nowhere/x.pth", ("/nowhere/x.pth", "no such file")),
        ("model.backbone=squeezenet1_1", ("phantom-pretext", "squeezenet1_1")),
        ("execution.gpus_per_client=0.5", ("0.5 GPU", "0 GPUs")),
        ("execution.device=cuda", ("execution.device", "no GPU", "cpu")),
        ("execution.ray_address=127.0.0.1:1", ("ray_address", "127.0.0.1:1", "refused", "ray start")),
        ("work_dir=/proc/fedsir", ("work_dir = /proc/fedsir", "Set work_dir")),
        ("tracking.uri=sqlite:////proc/fedsir/x.db", ("/proc/fedsir/x.db", "remedy")),
        ("tracking.uri=mlruns", ("tracking.uri", "folder", "sqlite:///mlruns/mlflow.db")),
        ("tracking.uri=ftp://x", ("tracking.uri", "ftp")),
        ("tracking.uri=http://127.0.0.1:1", ("no server answers at 127.0.0.1:1", "remedy")),
    ],
)
def test_bad_setting(refused_run: Callable[..., str], setting: str, parts: tuple[str, ...]) -> None:
    refused_run(setting, *parts)


@pytest.mark.parametrize(
    ("label_map", "parts"),
    [
        ("null", ("asymmetric noise needs", "uic_up")),
        ("kermani", ('"kermani"', "'kermany'")),
        ("[1, 2]", ("[1, 2]", "'kermany'")),
        ("{CNV: no}", ("CNV must be text",)),
        ("{CNV: XYZ}", ("'XYZ'", "CNV, DME, DRUSEN, NORMAL", "Remedy")),
        ("{CNV: CNV}", ("CNV", "itself")),
        ("wake_forest", ("wake_forest", "'GA'", "CNV, DME, DRUSEN, NORMAL")),
    ],
)
def test_label_map_that_does_not_fit(refused_run: Callable[..., str], label_map: str, parts: tuple[str, ...]) -> None:
    message = refused_run(f"federation.noise.label_map={label_map}", *parts, more=("federation.noise.type=asymmetric",))
    assert "label_map" in message
    assert ". or" not in message


def test_several_faults_are_told_at_once(refused_run: Callable[..., str]) -> None:
    refused_run("training.rouds=3", "ratio = 1.4", "training.rouds", more=("federation.noise.ratio=1.4",))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("training.rounds", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("training..rounds=3", "expected section.key=value"),
        ("name.first.second=3", "name is a value, not a section"),
        ("name=[1,", "not valid YAML"),
        ("name=*a", "aliases are not allowed"),
    ],
)
def test_bad_override(refused: Callable[..., str], override: str, part: str) -> None:
    refused(["run", "demo", "--set", "name=x", "--set", override], f"--set {override}", part)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("data: {source: phantom\nfederation: [1,", ("line 2, column 11",)),
        ("data:\n\tsource: phantom\n", ("line 2", "cannot start any token")),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", ("line 2", "aliases are not allowed")),
        ("a: !!python/object/apply:os.system ['echo']\n", ("python/object",)),
        ("name: a\nname: b\n", ("line 2", "'name' is given twice")),
        ("data:\n  source: phantom\n  source: kermany\n", ("line 3", "'source' is given twice")),
        ("- 1\n- 2\n", ("expected a mapping", "list")),
        ("", ("data: must be given", "method: must be given")),
        ("data: {cohort: uic}\nmethod: fedavg\n", ("data.source: must be given",)),
        ("{[1]: 2}", ("a key must be a word",)),
        ("1: 2\ndata: {source: phantom}\nmethod: fedavg\n", ("a key must be a word",)),
        ("name: 2020-13-45\n", ("month must be in 1..12",)),
        ("name: " + "[" * 20_000, ("nested too deeply",)),
        ("#" * 1_000_001, ("1000001 bytes",)),
    ],
    ids=lambda value: value[:12].strip() if isinstance(value, str) else "",
)
def test_bad_file(refused: Callable[..., str], tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    refused(["run", str(file)], str(file), *parts)


def test_file_that_is_none(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    refused(
        ["run", "nothere.yaml"],
        "no such configuration: nothere.yaml",
        "demo, kermany, rehearsal_kermany, rehearsal_uic",
    )
    refused(["run", "kermny"], "Did you mean the preset kermany?")
    refused(["run", str(tmp_path)], "is a folder")
    refused(["run", "/dev/zero"], "not a regular file")
    refused(["run", "x" * 5000], "cannot be read")
    refused(["run", str(tmp_path / "latin.yaml")], "not UTF-8 text (byte 6)")


@pytest.mark.parametrize("seeds", ["", "a", "1-", "-1", "3-1", "0,0", "0-2,1", "1.5", "²", "0-99999999999", "9" * 5000])
def test_bad_seeds(refused: Callable[..., str], seeds: str) -> None:
    refused(["compare", "demo", f"--seeds={seeds}"], "--seeds")


@pytest.mark.parametrize(
    ("methods", "part"),
    [
        ("oct_fedsir,fedavgg", "Did you mean fedavg?"),
        ("all_cleen", "Did you mean all_clean?"),
        (" , ", "at least one"),
        ("fedavg,fedavg", "once"),
    ],
)
def test_bad_methods(refused: Callable[..., str], methods: str, part: str) -> None:
    refused(["compare", "demo", "--methods", methods], "--methods", part, "fedavg")


@pytest.mark.parametrize(
    ("methods", "parts"),
    [
        ("fedavg,oct_fedsir/no_kf", ("oct_fedsir has no preset 'no_kf'", "Did you mean no_kd?")),
        ("all_clean/no_kd", ("no preset 'no_kd'", "Known: none.")),
        ("oct_fedsir,oct_fedsir/", ("oct_fedsir has no preset ''", "Known: equal_steps")),
        ("oct_fedsir/no_kd,oct_fedsir/no_kd", ("--methods", "once")),
    ],
)
def test_bad_variants(refused: Callable[..., str], methods: str, parts: tuple[str, ...]) -> None:
    refused(["compare", "demo", "--methods", methods], *parts)


def _kermany(store: str, root: Path, *more: str) -> list[str]:
    sets = (
        f"data.root={root}",
        "data.image_size=32",
        "model.backbone=tiny",
        "model.weights=random",
        "federation.clients=1",
        "federation.clean_clients=0",
        "federation.partition.min_client_size=1",
        "training.rounds=1",
        f"tracking.uri={store}",
        *more,
    )
    return ["run", "kermany", *(word for s in sets for word in ("--set", s))]


def test_class_missing_from_test(refused: Callable[..., str], store: str, kermany_folder: Callable[..., Path]) -> None:
    root = kermany_folder(without=["test/DME"])
    refused(_kermany(store, root), "kermany lacks images", "DME: no test image", "add them")


def test_corrupt_image(refused: Callable[..., str], store: str, kermany_folder: Callable[..., Path]) -> None:
    root = kermany_folder(broken="train/CNV/CNV-1-1.jpeg")
    refused(_kermany(store, root), "1 image file", "train/CNV/CNV-1-1.jpeg: ", "data.on_bad_image")


def test_patient_in_both_splits(refused: Callable[..., str], store: str, kermany_folder: Callable[..., Path]) -> None:
    root = kermany_folder(same_patient=True)
    refused(_kermany(store, root), "in train and in test", "patient 77", "drop_from_train")


def test_image_cache_that_cannot_be_written(
    refused: Callable[..., str], store: str, kermany_folder: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "regular").write_text("a text file")
    argv = _kermany(store, kermany_folder(), f"data.cache_dir={tmp_path}/regular/cache")
    refused(argv, "image cache", "regular/cache", "FEDSIR_CACHE")


@pytest.mark.parametrize("preset", ["uic", "wake_forest"])
def test_manifest_that_is_not_there(refused: Callable[..., str], store: str, preset: str) -> None:
    sets = ("data.manifest=/nowhere.csv", "model.weights=random", f"tracking.uri={store}")
    refused(["run", preset, *(w for s in sets for w in ("--set", s))], "/nowhere.csv does not exist", "data.manifest")


@pytest.mark.parametrize("preset", ["kermany", "uic", "wake_forest"])
def test_preset_without_its_data(refused: Callable[..., str], preset: str) -> None:
    key = "data.root" if preset == "kermany" else "data.manifest"
    refused(["run", preset], f"{key} must be set", f"--set {key}=")


def test_weights_of_another_architecture(refused_run: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "other.pth"
    torch.save({"layer.weight": torch.zeros(2, 3)}, file)
    for backbone in ("tiny", "squeezenet1_1", "shufflenet_v2_x1_0", "regnet_y_400mf"):
        refused_run(f"model.weights={file}", str(file), backbone, "missing", more=(f"model.backbone={backbone}",))


def test_weights_that_are_no_tensors(refused_run: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "x.pth"
    file.write_text("not weights")
    message = refused_run(f"model.weights={file}", str(file), "state_dict")
    assert "weights_only" not in message  # torch's own advice is to load the file unprotected


def test_imagenet_weights_without_network(
    refused_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Names the file to fetch and where to put it."""

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    refused_run(
        "model.weights=imagenet",
        "squeezenet1_1",
        "https://download.pytorch.org/models/squeezenet1_1",
        str(tmp_path),
        more=("model.backbone=squeezenet1_1",),
    )


def test_image_too_small_for_the_backbone(refused_run: Callable[..., str]) -> None:
    more = ("model.backbone=squeezenet1_1", "model.weights=random")
    refused_run("data.image_size=16", "image_size is 16", "squeezenet1_1", "32", more=more)


def test_unwritable_places_under_a_regular_file(refused_run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "regular").write_text("a text file")
    refused_run(f"work_dir={tmp_path}/regular/x", "work_dir", "Not a directory")
    refused_run(f"tracking.uri=sqlite:///{tmp_path}/regular/x.db", "regular/x.db", "remedy")
    refused_run(f"tracking.uri=sqlite:///{tmp_path}/regular", "not a database", "remedy")


def test_gpus_without_actors(refused_run: Callable[..., str]) -> None:
    refused_run("execution.gpus_per_client=0.5", "in-process", "gpus_per_client", more=("execution.actors=in-process",))


def test_pretext_weights_into_nowhere(refused: Callable[..., str], tmp_path: Path) -> None:
    refused(["data", "pretext-weights", "/nowhere/x.safetensors"], "/nowhere")
    refused(["data", "pretext-weights", str(tmp_path)], "is a folder")


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_refusal_leaves_the_checkpoint(refused: Callable[..., str], fedsir: Any, fresh: list[str]) -> None:
    settings = fedsir.tiny_options("execution.actors=in-process", "tracking.uri=sqlite:////proc/fedsir/x.db")
    checkpoint = load_run_file("demo", settings[1::2]).checkpoint_file
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"hours of work")
    refused(["run", "demo", *settings, *fresh], "/proc/fedsir/x.db")
    assert checkpoint.read_bytes() == b"hours of work"


def test_damaged_checkpoint(refused: Callable[..., str], fedsir: Any, store: str) -> None:
    settings = fedsir.tiny_options("execution.actors=in-process", f"tracking.uri={store}")
    checkpoint = load_run_file("demo", settings[1::2]).checkpoint_file
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"not a checkpoint")
    refused(["run", "demo", *settings], f"checkpoint {checkpoint} is damaged", f"Remove {checkpoint}")
    assert checkpoint.exists()


def test_same_run_in_two_processes(refused: Callable[..., str], fedsir: Any, store: str) -> None:
    settings = fedsir.tiny_options("execution.actors=in-process", f"tracking.uri={store}")
    with claim_run(load_run_file("demo", settings[1::2])):
        refused(["run", "demo", *settings], "another process", "demo, oct_fedsir, seed 0", "Wait for its end")


def test_compare_checks_every_seed_before_the_first_run(
    refused: Callable[..., str], fedsir: Any, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A federation that cannot be drawn at the second seed must not come up after the first has been trained."""
    from experiments import session
    from fedsir.errors import BadInput

    original = session.build_condition

    def build(config: Any, dataset: Any) -> Any:
        if config.seed == 1:
            raise BadInput("no partition for seed 1")
        return original(config, dataset)

    monkeypatch.setattr(session, "build_condition", build)
    settings = fedsir.tiny_options("execution.actors=in-process", f"tracking.uri={store}")
    refused(["compare", "demo", "--seeds", "0,1", *settings], "no partition for seed 1")


@pytest.mark.parametrize("argv", [["run", "--foo"], ["runn"], ["data", "inspekt"], ["run", "demo", "extra"], []])
def test_command_line_that_does_not_exist(fedsir: Any, argv: list[str]) -> None:
    ended = fedsir.call(*argv)
    assert ended.code == 2
    assert "Usage: " in ended.err + ended.out
    assert "Traceback" not in ended.err
