"""The pretext weights: shipped, strict, reproducible and of use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedsir.config.data import PhantomData
from fedsir.data.phantom import load_phantom
from fedsir.errors import BadInput
from fedsir.models.pretext import PRETEXT_FILE, load_pretext, pretrain, save
from fedsir.models.tiny import TinyFeatures


def features_of(network: TinyFeatures, images: np.ndarray) -> np.ndarray:
    batch = torch.from_numpy(np.array(images)).float().div(127.5).sub(1).unsqueeze(1).expand(-1, 3, -1, -1)
    with torch.no_grad():
        return network.eval()(batch).numpy()


def test_shipped_weights_load_and_are_small() -> None:
    network = TinyFeatures()
    load_pretext(network)
    assert PRETEXT_FILE.stat().st_size < 400_000
    assert all(torch.isfinite(tensor).all() for tensor in network.state_dict().values())


def test_shipped_features_tell_classes_apart_without_training() -> None:
    # The reason of the file: a linear rule on frozen features does much better than chance (1/4).
    data = load_phantom(PhantomData(source="phantom", image_size=64, train_images=400, test_images=200))
    network = TinyFeatures()
    load_pretext(network)
    train, test = features_of(network, data.train.images), features_of(network, data.test.images)
    centre, scale = train.mean(0), train.std(0) + 1e-6
    train, test = (np.column_stack([(z - centre) / scale, np.ones(len(z))]) for z in (train, test))
    targets = np.eye(4)[data.train.labels]
    rule = np.linalg.solve(train.T @ train + 10 * np.eye(train.shape[1]), train.T @ targets)
    accuracy = ((test @ rule).argmax(1) == data.test.labels).mean()
    assert accuracy > 0.7


def test_pretraining_is_deterministic_and_leaves_the_global_state_alone() -> None:
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    losses: list[float] = []
    first = pretrain(seed=3, images=256, epochs=2, on_epoch=lambda _, loss: losses.append(loss))
    again = pretrain(seed=3, images=256, epochs=2)
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert not first.training
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_saved_weights_come_back(tmp_path: Path) -> None:
    network, copy = TinyFeatures(), TinyFeatures()
    save(network, tmp_path / "w.safetensors")
    load_pretext(copy, tmp_path / "w.safetensors")
    for name, tensor in network.state_dict().items():
        assert torch.allclose(tensor.float(), copy.state_dict()[name].float(), rtol=1e-3, atol=1e-6)
        assert copy.state_dict()[name].dtype == tensor.dtype


def wrong_files(folder: Path) -> list[Path]:
    state = {name: tensor.clone() for name, tensor in TinyFeatures().state_dict().items()}
    first = next(iter(state))
    variants = {
        "missing": {name: tensor for name, tensor in state.items() if name != first},
        "extra": {**state, "head.weight": torch.zeros(4, 96)},
        "shape": {**state, first: torch.zeros(1, 3, 5, 5)},
    }
    for name, variant in variants.items():
        save_file(variant, folder / f"{name}.safetensors")
    (folder / "text.safetensors").write_text("not weights")
    return [*(folder / f"{name}.safetensors" for name in (*variants, "text")), folder / "absent.safetensors"]


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    for path in wrong_files(tmp_path):
        network = TinyFeatures()
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        with pytest.raises(BadInput, match=path.name):
            load_pretext(network, path)
        assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize(("images", "epochs"), [(10, 1), (256, 0)])
def test_too_small_a_task_is_refused(images: int, epochs: int) -> None:
    with pytest.raises(BadInput, match="needs"):
        pretrain(images=images, epochs=epochs)
