"""Methods by name, the package's own and those of other packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fedsir.errors import BadInput
from fedsir.methods.fedavg import FedAvgConfig
from fedsir.methods.oct_fedsir import OctFedSIRConfig
from fedsir.methods.registry import BUILT_IN, MethodEntry, find_method, method_names, parse_method_config

PLUGIN = """
from dataclasses import replace
from typing import Literal

from fedsir.config.method import MethodConfig
from fedsir.methods.base import MethodState
from fedsir.methods.registry import MethodEntry


class LazyConfig(MethodConfig):
    name: Literal["lazy"] = "lazy"
    factor: float = 0.5


class Lazy:
    state_type = MethodState

    def __init__(self, config):
        self.config = config

    def begin(self, server):
        return MethodState(weights=server.initial_weights)

    def round(self, server, state, t):
        server.note(f"round {t} passed")
        return replace(state, weights=replace(state.weights, values=state.weights.values * self.config.factor))


METHOD = MethodEntry(config=LazyConfig, build=Lazy, summary="does next to nothing", source="tests")
NOT_A_METHOD = 3
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with entry points, as pip would leave it: one method that works and some that do not."""
    (tmp_path / "lazy_method_of_tests.py").write_text(PLUGIN)
    info = tmp_path / "lazy_method_of_tests-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lazy-method-of-tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedsir.methods]\n"
        "lazy = lazy_method_of_tests:METHOD\n"
        "absent = module_that_nobody_wrote:METHOD\n"
        "number = lazy_method_of_tests:NOT_A_METHOD\n"
        "fedavg = lazy_method_of_tests:METHOD\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_methods_are_complete(name: str) -> None:
    entry = find_method(name)
    assert isinstance(entry, MethodEntry)
    config = entry.config()
    assert config.name == name
    method = entry.build(config)
    for part in ("begin", "round", "state_type"):
        assert hasattr(method, part)
    assert entry.summary
    assert entry.source


@pytest.mark.parametrize(
    ("name", "hint"),
    [("oct-fedsir", "Did you mean oct_fedsir?"), ("fedvag", "Did you mean fedavg?"), ("zzz", "Known: fedavg")],
)
def test_an_unknown_name_is_bad_input_with_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(BadInput, match=r"there is no method") as caught:
        find_method(name)
    assert hint in str(caught.value)
    assert repr(name) in str(caught.value)
    assert f"Known: {', '.join(BUILT_IN)}" in str(caught.value)
    if name == "zzz":
        assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", BUILT_IN)
def test_presets_are_valid_and_differ_from_the_defaults(name: str) -> None:
    entry = find_method(name)
    for preset in entry.presets:
        config = parse_method_config(f"{name}/{preset}")
        assert config.label == f"{name}/{preset}"
        assert config == parse_method_config({"name": name, "preset": preset})
        assert config.model_copy(update={"preset": None}) != entry.config()


def test_given_settings_win_over_those_of_a_preset() -> None:
    config = parse_method_config(
        {"name": "oct_fedsir/paper", "references": {"kappa": 5.0}, "identification": {"min_class_count": 7}}
    )
    assert isinstance(config, OctFedSIRConfig)
    assert (config.references.kappa, config.references.min_count) == (5.0, 1)
    assert (config.identification.min_class_count, config.identification.covariance) == (7, "full")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("oct_fedsir/no_kf", "Did you mean no_kd"),
        ("fedavg/fast", "Known: none"),
        ({"name": "oct_fedsir", "preset": 3}, "no preset 3"),
        ({"name": "oct_fedsir/no_kd", "preset": "no_la"}, "preset says 'no_la'"),
    ],
)
def test_an_unknown_preset_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_method_config(value)


def test_a_name_a_mapping_and_a_configuration_are_the_same() -> None:
    ready = OctFedSIRConfig()
    assert parse_method_config("oct_fedsir") == parse_method_config({"name": "oct_fedsir"}) == ready
    assert parse_method_config(ready) is ready
    assert parse_method_config("fedavg") == FedAvgConfig()


@pytest.mark.parametrize("value", [3, None, [], {}, {"name": 3}, {"epochs": 3}, True])
def test_anything_else_is_no_method(value: object) -> None:
    with pytest.raises(ValueError, match="the name of a method"):
        parse_method_config(value)


def test_settings_of_another_method_are_refused() -> None:
    with pytest.raises(ValidationError, match="stage_one"):
        parse_method_config({"name": "fedavg", "stage_one": {"epochs": 3}})
    with pytest.raises(ValidationError, match="epoch"):
        parse_method_config({"name": "oct_fedsir", "stage_one": {"epoch": 3}})


@pytest.mark.usefixtures("installed")
class TestPlugins:
    def test_they_are_listed_after_the_built_in_ones(self) -> None:
        names = method_names()
        assert names[: len(BUILT_IN)] == list(BUILT_IN)
        assert {"lazy", "absent", "number"} <= set(names[len(BUILT_IN) :])
        assert names.count("fedavg") == 1

    def test_they_run_like_any_other(self, lab: Any) -> None:
        config = lab.config({"name": "lazy", "factor": 0.25})
        recorder = lab.collector()
        result = lab.run(config, recorder=recorder)
        assert [r.notes for r in recorder.rounds] == [(f"round {t} passed",) for t in range(3)]
        initial = lab.condition(config).initial_weights.values
        assert result.weights.values == pytest.approx(initial * 0.25**3)
        assert config.identity() != lab.config("lazy").identity()

    def test_their_settings_are_checked(self, lab: Any) -> None:
        with pytest.raises(ValidationError, match="faktor"):
            lab.config({"name": "lazy", "faktor": 0.25})

    def test_they_cannot_take_the_name_of_a_built_in_one(self) -> None:
        assert find_method("fedavg").config is FedAvgConfig

    def test_one_that_cannot_be_loaded_is_bad_input(self) -> None:
        with pytest.raises(BadInput, match=r"'absent' from module_that_nobody_wrote:METHOD cannot be loaded"):
            find_method("absent")

    def test_one_that_is_no_method_is_bad_input(self) -> None:
        with pytest.raises(BadInput, match="expected a MethodEntry, got int"):
            find_method("number")

    def test_they_are_suggested(self) -> None:
        with pytest.raises(BadInput, match="Did you mean lazy"):
            find_method("lazi")
