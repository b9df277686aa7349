"""FedLSR through the coordinator: its ramp, what goes to the clients, and runs in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fedsir.methods.fedlsr import FedLSRConfig


def observe(lab: Any, config: Any, condition: Any = None) -> tuple[Any, Any, Any]:
    """Result, everything that went to the clients, and the recorder."""
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    result = lab.run(config, executor=watched, condition=condition, recorder=recorder)
    assert np.isfinite(result.weights.values).all()
    return result, watched, recorder


def weights_of_consistency(watched: Any) -> list[float]:
    return [d.items[0].task.consistency_weight for d in watched.tasks("TwoViewTraining")]


def test_defaults_are_the_official_ones_with_the_losses_as_coded() -> None:
    config = FedLSRConfig()
    losses, view = config.losses, config.view
    assert (config.gamma, config.ramp) == (0.4, 0.2)
    assert (losses.form, losses.entropy_weight) == ("coded", 0.6)
    assert (losses.inverse_temperature, losses.sharpening_temperature) == (3.0, 0.5)
    assert (view.flip, view.brightness, view.contrast, view.jitter_probability) == (True, 0.8, 0.8, 0.8)


@pytest.mark.parametrize("settings", [{"ramp": 1.2}, {"gamma": -0.1}, {"losses": {"form": "official"}}, {"mu": 0.1}])
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FedLSRConfig.model_validate(settings)


def test_every_client_trains_every_round_on_its_observed_labels(lab: Any) -> None:
    method = {"name": "fedlsr", "losses": {"form": "described"}, "view": {"contrast": 0.1}}
    config = lab.config(method, training={"local_epochs": 2})
    _, watched, recorder = observe(lab, config)
    rounds = watched.tasks("TwoViewTraining")
    assert [d.round for d in rounds] == [0, 1, 2]
    for dispatch in rounds:
        assert [i.client for i in dispatch.items] == [0, 1, 2, 3]
        for item in dispatch.items:
            np.testing.assert_array_equal(item.task.labels, recorder.started.federation.observed[item.client])
            assert item.task.budget == config.training
            assert (item.task.settings, item.task.view) == (config.method.losses, config.method.view)


def test_consistency_grows_over_a_fifth_of_the_rounds(lab: Any) -> None:
    _, watched, _ = observe(lab, lab.config("fedlsr", training={"rounds": 10}))
    assert weights_of_consistency(watched) == pytest.approx([0.0, 0.2] + [0.4] * 8)
    _, watched, _ = observe(lab, lab.config({"name": "fedlsr", "gamma": 1.0, "ramp": 1.0}))
    assert weights_of_consistency(watched) == pytest.approx([0.0, 1 / 3, 2 / 3])


def test_at_a_hundred_rounds_the_ramp_ends_at_twenty(lab: Any) -> None:
    """Seen from the first rounds, since the method asks for nothing but the number of the round."""
    config = lab.config("fedlsr", training={"rounds": 100})
    stopped = lab.dispatching(lab.executor)
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, executor=stopped, recorder=lab.interrupter(at=3))
    assert weights_of_consistency(stopped) == pytest.approx([0.0, 0.02, 0.04])


def test_every_setting_makes_a_difference(lab: Any) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"losses": {"form": "described"}},
        {"losses": {"entropy_weight": 0.0}},
        {"losses": {"inverse_temperature": 1.0}},
        {"losses": {"sharpening_temperature": 1.0}},
        {"gamma": 4.0},
        {"ramp": 1.0},
        {"view": {"flip": False}},
        {"view": {"brightness": 0.0}},
        {"view": {"contrast": 0.0}},
        {"view": {"jitter_probability": 0.0}},
    ]
    runs = (lab.config({"name": "fedlsr", **change}, training={"rounds": 2}) for change in changes)
    assert len({lab.run(config).weights_hash for config in runs}) == len(changes)


def test_it_identifies_nobody_and_costs_the_second_view(lab: Any) -> None:
    result, _, recorder = observe(lab, lab.config("fedlsr"))
    assert result.identification is None
    assert result.labels is None
    for record in recorder.rounds:
        assert record.metrics["cost/client_epochs"] == lab.clients
        assert record.metrics["cost/forward_units"] == 3 * lab.clients


def test_a_run_can_be_repeated_and_continued(lab: Any, tmp_path: Path) -> None:
    """Stopped inside the ramp, at its end and after it."""
    config = lab.config({"name": "fedlsr", "ramp": 0.4}, training={"rounds": 5})
    expected = lab.essence(lab.run(config))
    assert lab.essence(lab.run(config)) == expected
    for at in (1, 2, 4):
        file = tmp_path / f"{at}.safetensors"
        with pytest.raises(KeyboardInterrupt):
            lab.run(config, recorder=lab.interrupter(at=at), checkpoint=file)
        assert lab.essence(lab.run(config, checkpoint=file)) == expected


def test_single_class_clients_and_two_classes_are_survived(lab: Any) -> None:
    config = lab.config("fedlsr", training={"rounds": 2, "batch_size": 4})
    labels = lab.dataset(config).train.labels
    one = np.flatnonzero(labels == labels[0])[:9]
    observe(lab, config, lab.federation_of(config, [one, np.setdiff1d(np.arange(160), one)]))
    binary = lab.config("fedlsr", training={"rounds": 2}, data={"cohort": "wake_forest"})
    assert len(lab.dataset(binary).class_names) == 2
    observe(lab, binary)
