"""FedSIR: the published code's choices, and that it is OCT-FedSIR under other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsir.clients.objective import CrossEntropy, Distilled, LogitAdjusted
from fedsir.config.run import RunConfig
from fedsir.methods.fedsir import FedSIRConfig
from fedsir.methods.oct_fedsir import OctFedSIRConfig
from fedsir.methods.registry import find_method, parse_method_config
from fedsir.objectives import exp_ramp
from fedsir.server import RunServer, runtime_setup
from fedsir.spectral.decomposition import class_spectrum
from fedsir.spectral.identification import split_clients
from fedsir.spectral.references import provider_weight

# Relabels before the second and the third of three rounds.
SHORT: dict[str, Any] = {"name": "fedsir", "stage_one": {"epochs": 1}, "relabeling": {"every": 1}}


def observe(lab: Any, method: Any, condition: Any = None, **changes: Any) -> tuple[Any, Any, Any]:
    """Result, everything that went to the clients, and the recorder."""
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    config = lab.config(method, **changes)
    result = lab.run(config, executor=watched, condition=condition, recorder=recorder)
    assert np.isfinite(result.weights.values).all()
    return result, watched, recorder


def differences(one: Any, other: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Settings of nested mappings in which they differ, by dotted name."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return {} if one == other else {path: (one, other)}
    out: dict[str, tuple[Any, Any]] = {}
    for key in {**one, **other}:
        out |= differences(one.get(key), other.get(key), f"{path}.{key}".removeprefix("."))
    return out


# -- settings ----------------------------------------------------------------------------------------------------------


def test_defaults_are_the_published_codes() -> None:
    config = FedSIRConfig()
    stage, who, references = config.stage_one, config.identification, config.references
    assert (stage.length, stage.epochs, stage.lr, stage.weight_decay) == ("epochs", 5, 5e-5, 5e-2)
    assert (stage.transform, stage.batch_size) == ("train", None)
    assert (who.balance, who.descriptors, who.no_pairs) == (False, ("mean", "energy"), "zeros")
    assert (who.split, who.covariance, who.regularization, who.n_init) == ("mixture", "full", 1e-6, 30)
    assert (who.min_class_count, who.threshold, who.clean_component) == (20, 0.5, "first_descriptor")
    assert (who.feature_norm, who.similarity_sign) == ("none", "abs")
    assert (references.kappa, references.residual_directions) == (10.0, 12)
    assert (references.weight, references.min_count, references.strength_threshold) == ("n_gap_s1", 100, 0.03)
    assert (config.relabeling.every, config.relabeling.first, config.relabeling.rule) == (20, None, "agree")
    adjustment = config.logit_adjustment
    assert (adjustment.stage_one, adjustment.clean_clients, adjustment.noisy_clients) == (False, True, True)
    assert (adjustment.beta, adjustment.floor) == (1.0, 1.0)
    distillation = config.distillation
    assert distillation.weight.model_dump() == {"kind": "ramp", "maximum": 0.2, "begin": 2, "end": 49}
    assert (distillation.on, distillation.teacher) == ("disagree", "global")
    assert (distillation.teacher_temperature, distillation.student_temperature) == (0.8, 1.0)
    assert (config.init_main, config.aggregation, config.distance_buffers) == (
        "clean_aggregate",
        "distance_aware",
        True,
    )


def test_it_differs_from_oct_fedsir_in_named_settings_alone() -> None:
    found = differences(FedSIRConfig().model_dump(), OctFedSIRConfig().model_dump())
    assert set(found) == {
        "name",
        "stage_one.transform",
        "identification.balance",
        "identification.descriptors",
        "identification.no_pairs",
        "identification.covariance",
        "identification.regularization",
        "identification.clean_component",
        "references.weight",
        "references.min_count",
        "references.strength_threshold",
        "logit_adjustment.stage_one",
        "distillation.weight.kind",
        "distillation.weight.maximum",
        "distillation.weight.begin",
        "distillation.weight.end",
        "distillation.on",
        "distillation.teacher_temperature",
        "distance_buffers",
    }


@pytest.mark.parametrize(
    "setting",
    [
        {"stage_one": {"epochs": 3}},
        {"identification": {"n_init": 3}},
        {"references": {"kappa": 3.0}},
        {"logit_adjustment": {"beta": 0.3}},
        {"distillation": {"student_temperature": 0.3}},
    ],
)
def test_naming_one_setting_of_a_section_leaves_the_others_at_the_codes_choice(setting: dict[str, Any]) -> None:
    found = parse_method_config({"name": "fedsir", **setting}).model_dump()
    ((section, values),) = setting.items()
    ((name, value),) = values.items()
    assert differences(found, FedSIRConfig().model_dump()) == {
        f"{section}.{name}": (value, FedSIRConfig().model_dump()[section][name])
    }


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("faithful", {"preset": "faithful", "stage_one.batch_size": 64, "references.basis": "filled"}),
        ("equal_steps", {"preset": "equal_steps", "stage_one.length": "steps"}),
    ],
)
def test_presets_change_what_they_say(preset: str, expected: dict[str, Any]) -> None:
    found = differences(parse_method_config(f"fedsir/{preset}").model_dump(), FedSIRConfig().model_dump())
    assert {name: mine for name, (mine, _) in found.items()} == expected
    assert set(find_method("fedsir").presets) == {"faithful", "equal_steps"}


def test_a_provider_weighs_by_count_gap_and_share_of_its_first_singular_value() -> None:
    """200 images with singular values 10, 2 and 1: 200 * 0.8 * 10 / 13."""
    features = np.zeros((200, 5))
    features[:3, :3] = np.diag([10.0, 2.0, 1.0])
    spectrum = class_spectrum(features, kappa=10.0, max_residual=12)
    assert spectrum is not None
    assert provider_weight(spectrum, FedSIRConfig().references.weight) == pytest.approx(123.08, abs=0.005)
    assert provider_weight(spectrum, OctFedSIRConfig().references.weight) == 200


# -- who is noisy ------------------------------------------------------------------------------------------------------


def test_a_client_without_a_pair_looks_as_clean_as_can_be() -> None:
    """It enters the fit as (0, 0), far below everybody else, who are then the noisy component."""
    values = np.full((6, 3), np.nan)
    values[1:, 0] = [0.50, 0.52, 0.48, 0.51, 0.49]
    values[1:, 1] = values[1:, 0] ** 2
    split = split_clients(values, FedSIRConfig().identification, seed=0)
    assert split.clean.tolist() == [True] + [False] * 5
    assert split.p_clean[0] == pytest.approx(1.0)
    assert split.notes[0] == (
        "clients with fewer than two usable classes (0) are entered into the fit with descriptors 0."
    )
    assert split.mixture is not None
    assert split.mixture.columns == ("mean", "energy")


def test_single_class_clients_are_trusted_in_a_run(lab: Any) -> None:
    config = lab.config(SHORT)
    labels = lab.dataset(config).train.labels
    single = np.flatnonzero(labels == 2)[:20]
    others = np.array_split(np.setdiff1d(np.arange(160), single), 3)
    result, _, recorder = observe(lab, SHORT, lab.federation_of(config, [*others, single]))
    assert np.isnan(result.identification.descriptors[3]).all()
    assert result.identification.p_clean[3] == pytest.approx(1.0)
    assert result.identification.clean[3]
    assert any("(3) are entered into the fit with descriptors 0" in n for n in recorder.rounds[0].notes)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(lab: Any) -> tuple[RunServer, Any]:
    """A server of the short run, and what goes to its clients."""
    config = lab.config(SHORT)
    condition = lab.condition(config)
    watched = lab.dispatching(lab.executor)
    watched.prepare(runtime_setup(config, condition, "cpu"))
    return RunServer(config, condition, watched), watched


def test_the_teachers_weight_follows_the_published_ramp(server: tuple[RunServer, Any]) -> None:
    work, watched = server
    method = find_method("fedsir").build(parse_method_config({**SHORT, "relabeling": {"enabled": False}}))
    state = method.begin(work)
    assert not state.identification.clean.all()
    for t, expected in ((0, 0.001348), (2, 0.001348), (20, 0.029807), (49, 0.2), (99, 0.2)):
        method.round(work, state, t)
        distilled = [
            i.task.recipe.objective for i in watched.log[-1].items if isinstance(i.task.recipe.objective, Distilled)
        ]
        assert len(distilled) == np.count_nonzero(~state.identification.clean)
        for objective in distilled:
            assert objective.kd_weight == pytest.approx(expected, abs=5e-7)
            assert objective.kd_weight == 0.2 * exp_ramp(t, 2, 49)
            assert (objective.teacher_temperature, objective.student_temperature) == (0.8, 1.0)


def test_clients_train_as_in_the_published_code(lab: Any) -> None:
    """Plain cross entropy in stage I, adjusted logits afterwards, a teacher at the noisy ones."""
    result, watched, _ = observe(lab, SHORT)
    clean = result.identification.clean
    assert clean.any()
    assert not clean.all()
    for item in watched.log[0].items:
        assert isinstance(item.task.recipe.objective, CrossEntropy)
        assert (item.task.recipe.optimizer.lr, item.task.recipe.optimizer.weight_decay) == (5e-5, 5e-2)
        assert item.task.transform == "train"
        assert not item.task.settings.balance
    for dispatch in watched.tasks("LocalTraining"):
        for item in dispatch.items:
            kind = LogitAdjusted if clean[item.client] else Distilled
            assert type(item.task.recipe.objective) is kind
            assert item.task.recipe.teacher_logits == (not clean[item.client])


def test_after_the_first_relabelling_the_teacher_is_heard_where_the_criteria_disagree(lab: Any) -> None:
    method = {**SHORT, "relabeling": {"first": 2, "every": 2}}
    _, watched, _ = observe(lab, method, training={"rounds": 5})
    agreement: dict[int, NDArray[np.bool_]] = {}
    masked = []
    for dispatch in watched.log:
        kind = type(dispatch.items[0].task).__name__
        if kind == "Relabel":
            agreement = {
                i.client: o.result.state.agreement for i, o in zip(dispatch.items, dispatch.outcomes, strict=True)
            }
        if kind != "LocalTraining":
            continue
        masks = {i.client: i.task.recipe.extras["kd_mask"] for i in dispatch.items if i.task.recipe.extras}
        masked.append(bool(masks))
        # A mask holds until the next relabelling.
        assert set(masks) == set(agreement)
        for k, mask in masks.items():
            np.testing.assert_array_equal(mask, ~agreement[k])
    assert masked == [False, False, True, True, True]


# -- whole runs --------------------------------------------------------------------------------------------------------


def test_it_is_oct_fedsir_under_its_settings(lab: Any) -> None:
    ours = lab.config(SHORT)
    settings = {**ours.method.model_dump(exclude={"preset"}), "name": "oct_fedsir"}
    theirs = RunConfig.model_validate({**ours.model_dump(), "method": settings})
    assert type(theirs.method) is OctFedSIRConfig
    one, other = lab.run(ours), lab.run(theirs)
    assert lab.essence(one) == lab.essence(other)
    assert one.weights_hash != lab.run(lab.config("oct_fedsir")).weights_hash


def test_a_run_can_be_repeated_and_continued(lab: Any, tmp_path: Path) -> None:
    """Interrupted before the first relabelling, between two, and when only the end is left."""
    config, alone = lab.config(SHORT), lab.collector()
    expected = lab.essence(lab.run(config, recorder=alone))
    assert lab.essence(lab.run(config)) == expected
    for at in (1, 2, 3):
        file = tmp_path / f"{at}.safetensors"
        with pytest.raises(KeyboardInterrupt):
            lab.run(config, recorder=lab.interrupter(at=at), checkpoint=file)
        watched, recorder = lab.dispatching(lab.executor), lab.collector()
        assert lab.essence(lab.run(config, executor=watched, recorder=recorder, checkpoint=file)) == expected
        assert watched.tasks("StageOne") == []
        for one, other in zip(recorder.rounds, alone.rounds[at:], strict=True):
            assert one.metrics["test/loss"] == other.metrics["test/loss"]
            assert one.notes == other.notes


@pytest.mark.parametrize("preset", ["faithful", "equal_steps"])
def test_variants_run(lab: Any, preset: str) -> None:
    short = {"epochs": 1} if preset == "faithful" else {"steps": 3}
    result, watched, _ = observe(lab, {**SHORT, "preset": preset, "stage_one": short})
    (stage,) = watched.tasks("StageOne")
    if preset == "faithful":
        assert {i.task.recipe.batch_size for i in stage.items} == {64}
        forming = [i.task for d in watched.tasks("FormReference") for i in d.items]
        assert {task.settings.basis for task in forming} == {"filled"}
        assert {r.directions for r in result.references} <= {0, 12}
    else:
        assert [u.training.steps for u in stage.updates.values()] == [3] * 4
    assert result.label_history
