"""First weights: what is asked for or an error that says what to do, never silently something else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from safetensors.numpy import save_file

from fedsir.config.training import ModelConfig
from fedsir.errors import BadInput
from fedsir.models.binding import weights_of
from fedsir.models.network import Network, initial_network

LARGE = ("squeezenet1_1", "shufflenet_v2_x1_0", "regnet_y_400mf")
CHECKPOINT = {
    "squeezenet1_1": "squeezenet1_1-b8a52dc0.pth",
    "shufflenet_v2_x1_0": "shufflenetv2_x1-5666bf0f80.pth",
    "regnet_y_400mf": "regnet_y_400mf-e6988f5f.pth",
}


def network(backbone: str, weights: str | Path, seed: int = 0) -> Network:
    config = ModelConfig.model_validate({"backbone": backbone, "weights": str(weights)})
    return initial_network(config, 4, seed)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for downloaded weights on a machine without network; returns where files are looked for."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise URLError("name resolution failed")

    monkeypatch.setattr("torch.hub.urlopen", unreachable)
    monkeypatch.setattr("torch.hub._hub_dir", str(tmp_path / "hub"))
    return tmp_path / "hub" / "checkpoints"


def torchvision_file(folder: Path, backbone: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A weights file in torchvision's own layout, classifier included."""
    torch.manual_seed(5)
    state = dict(torchvision.models.get_model(backbone, weights=None).state_dict())
    path = folder / f"{backbone}.pth"
    torch.save(state, path)
    return path, state


@pytest.mark.parametrize("backbone", LARGE)
def test_without_network_the_error_names_the_file_and_its_place(backbone: str, hub: Path) -> None:
    with pytest.raises(BadInput) as caught:
        network(backbone, "imagenet")
    text = str(caught.value)
    assert str(hub / CHECKPOINT[backbone]) in text
    assert f"https://download.pytorch.org/models/{CHECKPOINT[backbone]}" in text
    assert "name resolution failed" in text
    assert "model.weights" in text


@pytest.mark.parametrize("error", [TimeoutError("timed out"), ConnectionResetError("reset"), OSError("disk full")])
def test_any_failure_of_the_download_is_bad_input(hub: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("torch.hub.urlopen", fail)
    with pytest.raises(BadInput, match=str(error)):
        network("squeezenet1_1", "imagenet")
    assert not (hub / CHECKPOINT["squeezenet1_1"]).exists()


@pytest.mark.parametrize("content", [b"", b"<html>Please log in</html>", b"PK\x03\x04 cut off"])
def test_a_damaged_file_in_the_right_place_is_bad_input(hub: Path, content: bytes) -> None:
    """What a broken copy to a machine without network leaves behind."""
    hub.mkdir(parents=True)
    place = hub / CHECKPOINT["squeezenet1_1"]
    place.write_bytes(content)
    with pytest.raises(BadInput, match="squeezenet1_1") as caught:
        network("squeezenet1_1", "imagenet")
    assert str(place) in str(caught.value)


def test_a_file_in_the_right_place_needs_no_network(hub: Path) -> None:
    hub.mkdir(parents=True)
    path, state = torchvision_file(hub, "squeezenet1_1")
    path.rename(hub / CHECKPOINT["squeezenet1_1"])
    loaded = network("squeezenet1_1", "imagenet").backbone.state_dict()
    assert torch.equal(loaded["features.0.weight"], state["features.0.weight"])


def test_imagenet_weights_of_another_architecture_are_bad_input(hub: Path) -> None:
    hub.mkdir(parents=True)
    path, _ = torchvision_file(hub, "shufflenet_v2_x1_0")
    path.rename(hub / CHECKPOINT["squeezenet1_1"])
    with pytest.raises(BadInput, match="does not belong to the backbone squeezenet1_1"):
        network("squeezenet1_1", "imagenet")


def test_there_is_no_imagenet_for_tiny(hub: Path) -> None:  # noqa: ARG001 - no network
    with pytest.raises(BadInput, match=r"no ImageNet weights for the backbone tiny(.|\n)*phantom-pretext"):
        network("tiny", "imagenet")


@pytest.mark.parametrize("backbone", LARGE)
def test_torchvision_files_load_strictly_without_their_classifier(backbone: str, tmp_path: Path) -> None:
    path, state = torchvision_file(tmp_path, backbone)
    loaded = network(backbone, path)
    for name, tensor in loaded.backbone.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    # The head is the one that the seed gives with any other backbone weights.
    assert torch.equal(loaded.head.weight, network(backbone, "random").head.weight)


def test_features_are_torchvisions(tmp_path: Path) -> None:
    path, state = torchvision_file(tmp_path, "regnet_y_400mf")
    original = torchvision.models.regnet_y_400mf(weights=None)
    original.load_state_dict(state)
    original.fc = torch.nn.Identity()
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = original.eval()(images)
        assert torch.equal(network("regnet_y_400mf", path).eval().features(images), expected)


def test_a_state_dict_inside_a_training_checkpoint_is_found(tmp_path: Path) -> None:
    _, state = torchvision_file(tmp_path, "squeezenet1_1")
    path = tmp_path / "training.pth"
    torch.save({"epoch": 3, "state_dict": state}, path)
    loaded = network("squeezenet1_1", path)
    assert torch.equal(loaded.backbone.state_dict()["features.0.bias"], state["features.0.bias"])


@pytest.mark.parametrize(("file", "backbone"), [("shufflenet_v2_x1_0", "squeezenet1_1"), ("squeezenet1_1", "tiny")])
def test_a_file_of_another_architecture_is_refused(file: str, backbone: str, tmp_path: Path) -> None:
    path, _ = torchvision_file(tmp_path, file)
    with pytest.raises(BadInput, match=rf"does not belong to the backbone {backbone}: of \d+ tensors \d+ missing"):
        network(backbone, path)


def test_a_file_with_a_tensor_less_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    path, state = torchvision_file(tmp_path, "squeezenet1_1")
    torch.save({n: v for n, v in state.items() if n != "features.3.squeeze.bias"}, path)
    with pytest.raises(BadInput, match=r"1 missing \(first: features\.3\.squeeze\.bias\)"):
        network("squeezenet1_1", path)
    torch.save({**state, "features.0.bias": torch.zeros(3)}, path)
    with pytest.raises(BadInput, match=r"1 of another shape \(first: features\.0\.bias\)"):
        network("squeezenet1_1", path)
    torch.save({**state, "neck.bias": torch.zeros(3)}, path)
    with pytest.raises(BadInput, match=r"1 unexpected \(first: neck\.bias\)"):
        network("squeezenet1_1", path)


class Armed:
    """Runs code when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("writer", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, protocol=2))])
def test_files_with_code_are_refused_and_not_run(tmp_path: Path, writer: Any) -> None:
    marker, path = tmp_path / "the code ran", tmp_path / "weights.pth"
    writer({"features.0.weight": torch.zeros(1), "extra": Armed(marker)}, path)
    with pytest.raises(BadInput, match="pickled code"):
        network("squeezenet1_1", path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "content"), [("weights.pth", b""), ("weights.pth", b"text"), ("weights.safetensors", b"text" * 10)]
)
def test_files_that_hold_no_tensors_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match="cannot be read as plain tensors"):
        network("tiny", path)


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"weight": 3}, torch.zeros(2)])
def test_files_without_a_state_dict_are_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "weights.pth"
    torch.save(content, path)
    with pytest.raises(BadInput, match="holds no state_dict"):
        network("tiny", path)


@pytest.mark.parametrize("weights", ["nowhere/weights.pth", ".", "Random", "phantom_pretext"])
def test_a_missing_file_is_bad_input(weights: str) -> None:
    with pytest.raises(BadInput, match=r"no such file(.|\n)*imagenet, random, phantom-pretext"):
        network("tiny", weights)


def test_the_weights_of_a_run_can_start_another(lab: Any, tmp_path: Path) -> None:
    """As recorded at the end of a run: tensors by name in a safetensors file."""
    result = lab.run(lab.config())
    path = tmp_path / "last.safetensors"
    save_file({name: value.copy() for name, value in result.schema.named(result.weights)}, path)
    weights, schema = weights_of(network("tiny", path, seed=1))
    trained = dict(result.schema.named(result.weights))
    for name, value in schema.named(weights):
        if name.startswith("backbone."):
            np.testing.assert_array_equal(value, trained[name], err_msg=name)
        else:
            assert not np.array_equal(value, trained[name])


@pytest.mark.parametrize("backbone", LARGE)
def test_pretext_weights_exist_for_tiny_alone(backbone: str) -> None:
    with pytest.raises(BadInput, match=rf"only for the backbone tiny, not for {backbone}"):
        network(backbone, "phantom-pretext")


def test_pretext_weights_are_not_random_ones() -> None:
    pretext = [network("tiny", "phantom-pretext", seed).backbone.state_dict() for seed in (0, 1)]
    random = [network("tiny", "random", seed).backbone.state_dict() for seed in (0, 1)]
    name = next(iter(pretext[0]))
    assert torch.equal(pretext[0][name], pretext[1][name])
    assert not torch.equal(random[0][name], random[1][name])
    assert not torch.equal(pretext[0][name], random[0][name])


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_damaged_pretext_weights_are_bad_input(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsir.models import pretext, weights

    path = tmp_path / "tiny.safetensors"
    if damage == "cut":
        path.write_bytes(pretext.PRETEXT_FILE.read_bytes()[:-10])
    if damage == "other":
        save_file({"weight": np.zeros((2, 2), np.float32)}, path)
    monkeypatch.setattr(weights, "load_pretext", lambda features: pretext.load_pretext(features, path))
    with pytest.raises(BadInput, match=r"tiny\.safetensors"):
        network("tiny", "phantom-pretext")


def test_random_is_the_only_way_to_random_weights(hub: Path, tmp_path: Path) -> None:  # noqa: ARG001 - no network
    """Whatever else is asked for and cannot be had is an error."""
    empty = tmp_path / "empty.safetensors"
    save_file({}, empty)
    for backbone in ("squeezenet1_1", "tiny"):
        for weights in ("imagenet", "Random", "none", str(empty), str(tmp_path)):
            with pytest.raises(BadInput):
                network(backbone, weights)
        network(backbone, "random")
