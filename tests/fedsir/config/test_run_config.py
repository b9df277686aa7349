"""The configuration of a run: what is refused, and what is part of a run's identity."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from fedsir.config.run import RunConfig
from fedsir.methods.registry import BUILT_IN, find_method


def values(**changes: Any) -> dict[str, Any]:
    """The shortest run file, with dotted keys changed (`__` for dots)."""
    out: dict[str, Any] = {"data": {"source": "phantom"}, "method": {"name": "oct_fedsir"}}
    for key, value in changes.items():
        *path, last = key.split("__")
        section = out
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return out


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(values(**changes))


def leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}__")
        else:
            yield f"{prefix}{key}"


# Another value for every key that determines a result.
DETERMINES: dict[str, Any] = {
    "seed": 1,
    "data__cohort": "uic",
    "data__image_size": 64,
    "data__train_images": 1999,
    "data__test_images": 499,
    "data__images_per_patient": 3,
    "data__seed": 1,
    "data__transform__mean": 0.4,
    "data__transform__std": [0.2, 0.3, 0.4],
    "data__transform__horizontal_flip": False,
    "federation__clients": 11,
    "federation__clean_clients": 3,
    "federation__public_pool": 7,
    "federation__clean_selection": "random",
    "federation__cover_min_per_class": 5,
    "federation__partition__alpha": 0.5,
    "federation__partition__variant": "split",
    "federation__partition__unit": "patient",
    "federation__partition__min_client_size": 11,
    "federation__partition__max_redraws": 10,
    "federation__noise__type": "none",
    "federation__noise__ratio": 0.61,
    "federation__noise__label_map": "kermany",
    "federation__noise__rounding": "round",
    "model__backbone": "tiny",
    "model__weights": "random",
    "model__dropout": 0.1,
    "training__rounds": 99,
    "training__local_epochs": 2,
    "training__batch_size": 64,
    "training__optimizer__lr": 1e-3,
    "training__optimizer__weight_decay": 0.0,
    "training__participation": 0.5,
    "method__stage_one__length": "steps",
    "method__stage_one__epochs": 4,
    "method__stage_one__steps": 59,
    "method__stage_one__transform": "train",
    "method__stage_one__batch_size": 64,
    "method__stage_one__lr": 1e-3,
    "method__stage_one__weight_decay": 0.0,
    "method__identification__balance": False,
    "method__identification__feature_norm": "l2",
    "method__identification__similarity_sign": "oriented",
    "method__identification__min_class_count": 5,
    "method__identification__descriptors": ["mean"],
    "method__identification__no_pairs": "zeros",
    "method__identification__split": "largest_gap",
    "method__identification__covariance": "full",
    "method__identification__regularization": 1e-6,
    "method__identification__n_init": 10,
    "method__identification__max_iter": 100,
    "method__identification__clean_component": "first_descriptor",
    "method__identification__threshold": 0.6,
    "method__identification__mixture_min_clients": 4,
    "method__init_main": "shared_init",
    "method__references__kappa": 5.0,
    "method__references__residual_directions": 5,
    "method__references__weight": "n_gap_s1",
    "method__references__min_count": 100,
    "method__references__strength_threshold": 0.03,
    "method__references__basis": "filled",
    "method__relabeling__enabled": False,
    "method__relabeling__every": 10,
    "method__relabeling__first": 5,
    "method__relabeling__rule": "sr",
    "method__relabeling__keep_unreferenced": False,
    "method__logit_adjustment__stage_one": False,
    "method__logit_adjustment__clean_clients": False,
    "method__logit_adjustment__noisy_clients": False,
    "method__logit_adjustment__beta": 0.5,
    "method__logit_adjustment__eps": 1e-6,
    "method__logit_adjustment__floor": 0.5,
    "method__logit_adjustment__prior_source": "corrected",
    "method__distillation__enabled": False,
    "method__distillation__weight": {"kind": "constant", "value": 0.5},
    "method__distillation__on": "disagree",
    "method__distillation__teacher": "clean",
    "method__distillation__teacher_temperature": 0.8,
    "method__distillation__student_temperature": 2.0,
    "method__aggregation": "sample_weighted",
    "method__distance_buffers": True,
    "evaluation__bootstrap_samples": 999,
    "evaluation__confidence": 0.9,
    "execution__threads": 2,
    "execution__device": "cpu",
    "execution__precision": "bf16-mixed",
    "execution__deterministic": False,
    "execution__compile": True,
}
# And for every key that says where a run happens or what it is called.
DOES_NOT: dict[str, Any] = {
    "name": "another",
    "execution__actors": "per-client",
    "execution__gpus_per_client": 0.5,
    "execution__memory_cap": 0.5,
    "execution__ray_address": "ray://elsewhere:10001",
    "execution__startup_timeout_s": 5.0,
    "execution__task_timeout_s": None,
}
FIXED = {"data__source", "method__name", "method__preset", "method__distillation__weight__kind"}


def test_every_key_is_known_to_these_tests() -> None:
    keys = set(leaves(config().model_dump(mode="json")))
    assert keys - FIXED == (DETERMINES.keys() | DOES_NOT.keys()) - {"method__distillation__weight"}


@pytest.mark.parametrize("key", DETERMINES)
def test_what_determines_the_result_changes_the_identity(key: str) -> None:
    changed = config(**{key: DETERMINES[key]})
    assert changed != config()
    assert changed.identity() != config().identity()


@pytest.mark.parametrize("key", DOES_NOT)
def test_what_does_not_determine_the_result_keeps_the_identity(key: str) -> None:
    changed = config(**{key: DOES_NOT[key]})
    assert changed != config()
    assert changed.identity() == config().identity()


def test_identities_are_all_different() -> None:
    identities = [config(**{key: value}).identity() for key, value in DETERMINES.items()]
    assert len({*identities, config().identity(), config(method="fedavg").identity()}) == len(identities) + 2


def test_a_preset_is_the_same_run_as_its_settings() -> None:
    preset = config(method={"name": "oct_fedsir", "preset": "no_kd"})
    assert preset.identity() == config(method__distillation__enabled=False).identity()
    assert preset.identity() != config().identity()


def test_methods_share_their_condition() -> None:
    condition = config().condition_identity()
    assert config(method="fedavg", training__rounds=7).condition_identity() == condition
    for change in ({"seed": 1}, {"federation__noise__ratio": 0.5}, {"training__batch_size": 64}):
        assert config(**change).condition_identity() != condition


def test_the_place_of_the_image_cache_keeps_the_identity() -> None:
    kermany = {"source": "kermany", "root": "/images"}

    def identity(**more: Any) -> str:
        return config(data={**kermany, **more}).identity()

    assert identity(cache_dir="/elsewhere") == identity()
    assert identity(root="/other") != identity()
    assert identity(on_bad_image="skip") != identity()
    assert identity(on_patient_overlap="drop_from_train") != identity()


def test_a_run_recorded_before_participation_could_be_set_is_the_same_run() -> None:
    assert config().identity() == "ee7bc48b84e75c4d"
    assert config(training__participation=1).identity() == config().identity()


def test_runs_with_other_participants_share_federation_and_stage_one() -> None:
    assert config(training__participation=0.5).condition_identity() == config().condition_identity()


@pytest.mark.parametrize("name", BUILT_IN)
def test_only_methods_that_can_do_with_some_of_the_clients_get_some(name: str) -> None:
    changes = {"method": name, "training__participation": 0.5}
    if find_method(name).partial_participation:
        assert config(**changes).training.participation == 0.5
    else:
        with pytest.raises(ValidationError, match=rf"participation is 0.5, but method {name} needs every client"):
            config(**changes)
    assert config(method=name).training.participation == 1.0


def test_it_is_rhfl_that_needs_everybody() -> None:
    assert [name for name in BUILT_IN if not find_method(name).partial_participation] == ["rhfl"]
    with pytest.raises(ValidationError, match="rhfl needs every client"):
        config(method="rhfl/averaged", training__participation=0.99)


def test_a_default_that_is_written_out_keeps_the_identity() -> None:
    written = RunConfig.model_validate(json.loads(config().model_dump_json()))
    assert written == config()
    assert written.identity() == config().identity()
    assert config(method="oct_fedsir").identity() == config().identity()
    assert len(config().identity()) == 16
    int(config().identity(), 16)


@pytest.mark.parametrize(
    "key",
    [
        "extra",
        "data__folder",
        "data__transform__rotate",
        "federation__noise__eta",
        "federation__partition__beta",
        "model__width",
        "training__optimizer__momentum",
        "method__stage__epochs",
        "method__relabeling__interval",
        "method__distillation__temperature",
        "evaluation__folds",
        "execution__workers",
    ],
)
def test_unknown_keys_are_refused_by_name(key: str) -> None:
    with pytest.raises(ValidationError, match=key.rsplit("__", 1)[-1]):
        config(**{key: 1})


INTEGERS = [k for k, v in DETERMINES.items() if type(v) is int] + ["execution__actors"]
FLOATS = [k for k, v in {**DETERMINES, **DOES_NOT}.items() if type(v) is float]


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", [True, "3", 3.0, 2.5, None, -1])
def test_integers_are_integers(key: str, value: object) -> None:
    optional = {"federation__cover_min_per_class", "method__stage_one__batch_size", "method__relabeling__first"}
    if value is None and key in optional:
        config(**{key: value})
        return
    with pytest.raises(ValidationError):
        config(**{key: value})


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [True, False, "0.5", float("nan"), float("inf"), -0.5])
def test_numbers_are_finite_numbers(key: str, value: object) -> None:
    if key == "data__transform__mean" and value == -0.5:
        config(**{key: value})
        return
    with pytest.raises(ValidationError):
        config(**{key: value})


def test_a_whole_number_is_a_number() -> None:
    assert config(federation__noise__ratio=1, training__optimizer__lr=1).federation.noise.ratio == 1.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("federation__clients", 0),
        ("federation__clean_clients", 11),
        ("federation__noise__ratio", 1.01),
        ("federation__noise__type", "pairwise"),
        ("federation__noise__label_map", "kermani"),
        ("federation__partition__alpha", 0.0),
        ("data__image_size", 0),
        ("data__source", "files"),
        ("data__transform__std", 0.0),
        ("data__transform__mean", [0.1, 0.2]),
        ("model__dropout", 1.0),
        ("model__weights", ""),
        ("model__backbone", "resnet18"),
        ("training__rounds", 0),
        ("training__batch_size", 0),
        ("training__optimizer__lr", 0.0),
        ("training__participation", 0.0),
        ("training__participation", 1.5),
        ("evaluation__confidence", 1.5),
        ("execution__actors", 0),
        ("execution__actors", "all"),
        ("execution__threads", 0),
        ("execution__device", "mps"),
        ("execution__precision", "16"),
        ("execution__gpus_per_client", "measured"),
        ("execution__memory_cap", 0.0),
        ("execution__memory_cap", 1.5),
        ("method__identification__descriptors", []),
        ("method__identification__threshold", -0.1),
        ("method__relabeling__every", 0),
        ("method__distillation__weight", {"kind": "constant", "value": 1.5}),
        ("method__distillation__weight", {"kind": "linear"}),
        ("method__name", "oct-fedsir"),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValidationError):
        config(**{key: value})


def test_asymmetric_noise_needs_a_map() -> None:
    with pytest.raises(ValidationError, match=r"needs noise\.label_map: one of kermany"):
        config(federation__noise__type="asymmetric")
    assert config(federation__noise={"type": "asymmetric", "label_map": {"CNV": "DME"}}).federation.noise.label_map


@pytest.mark.parametrize("missing", ["data", "method"])
def test_images_and_method_must_be_named(missing: str) -> None:
    with pytest.raises(ValidationError, match=missing):
        RunConfig.model_validate({k: v for k, v in values().items() if k != missing})


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().training.rounds = 3  # type: ignore[misc]
