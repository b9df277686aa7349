"""The method in the README of `fedsir/methods`, installed as another distribution would install it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import fedsir.methods
from fedsir.aggregation import weighted_mean
from fedsir.methods.registry import find_method, method_names

README = Path(fedsir.methods.__file__).with_name("README.md")
ROUNDS = 3


def code_block(language: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    return str(blocks[0])


@pytest.fixture
def entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Installs the example; gives the name of its entry point."""
    ((name, target),) = tomllib.loads(code_block("toml"))["project"]["entry-points"]["fedsir.methods"].items()
    module = target.partition(":")[0]
    (tmp_path / f"{module}.py").write_text(code_block("python"), encoding="utf-8")
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fedsir.methods]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(name)


def test_it_is_found_by_its_name(entry_point: str) -> None:
    assert method_names()[-1] == entry_point
    assert find_method(entry_point).config().name == entry_point


def test_it_averages_as_it_says(lab: Any, entry_point: str) -> None:
    config = lab.config({"name": entry_point, "sharpness": 3.0}, training={"rounds": ROUNDS})
    watched = lab.dispatching(lab.executor)
    result = lab.run(config, executor=watched)
    losses = None
    for t, dispatch in enumerate(watched.tasks("LocalTraining")):
        updates = list(dispatch.updates.values())
        now = np.array([u.loss for u in updates])
        losses = now if losses is None else (losses + now) / 2
        # One round of warm-up, a tenth of three rounded up.
        trust = np.ones(lab.clients) if t == 0 else np.exp(-3.0 * (losses - losses.min()))
        expected = weighted_mean([u.weights for u in updates], trust * [u.samples for u in updates])
        assert expected is not None
        after = watched.tasks("PredictTest")[t].broadcast["weights"]
        np.testing.assert_allclose(after.values, expected.values, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(result.weights.values, after.values)
    assert trust.min() < 0.9


def test_without_sharpness_it_is_fedavg(lab: Any, entry_point: str) -> None:
    flat = lab.run(lab.config({"name": entry_point, "sharpness": 0.0}))
    assert flat.weights_hash == lab.run(lab.config()).weights_hash


def test_it_continues_from_a_checkpoint_and_its_settings_are_checked(
    lab: Any, entry_point: str, tmp_path: Path
) -> None:
    config, file = lab.config(entry_point), tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, recorder=lab.interrupter(at=1), checkpoint=file)
    assert lab.essence(lab.run(config, checkpoint=file)) == lab.essence(lab.run(config))
    with pytest.raises(ValidationError, match="sharpnes"):
        lab.config({"name": entry_point, "sharpnes": 1.0})
