"""FedProx: the penalty by hand, and what it comes to at its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fedsir.clients.module import Batch
from fedsir.methods.fedprox import FedProxConfig, Proximal
from fedsir.objectives import cross_entropy


def penalty(mu: float, parameters: list[Tensor], reference: list[Tensor]) -> Tensor:
    """What the objective adds to the cross entropy of constant logits."""

    class Constant:
        def parameters(self) -> list[Tensor]:
            return parameters

        def __call__(self, images: Tensor) -> Tensor:
            return torch.zeros(len(images), 2)

    batch = Batch(torch.zeros(3, 1), torch.tensor([0, 1, 1]), {})
    network: Any = Constant()
    return Proximal(mu, reference)(network, batch) - cross_entropy(torch.zeros(3, 2), batch.labels)


def test_squared_norms_of_all_tensors_add_up() -> None:
    ours = [torch.tensor([5.0]), torch.tensor([[6.0]])]
    received = [torch.tensor([2.0]), torch.tensor([[2.0]])]
    assert float(penalty(0.2, ours, received)) == pytest.approx(2.5)


def test_its_gradient_is_mu_times_the_difference() -> None:
    ours = torch.tensor([1.0, -2.0, 4.0], requires_grad=True)
    received = torch.tensor([0.0, 1.0, 4.0], requires_grad=True)
    penalty(0.2, [ours], [received]).backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, 0.2 * (ours - received).detach())
    assert received.grad is None


def test_running_statistics_do_not_count() -> None:
    network: Any = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2))
    network.eval()
    objective = Proximal(1e6, [p.detach().clone() for p in network.parameters()])
    batch = Batch(torch.tensor([[1.0, 2.0]]), torch.tensor([0]), {})
    network[1].running_mean += 3.0
    with torch.no_grad():
        assert float(objective(network, batch)) == float(cross_entropy(network(batch.images), batch.labels))


def test_without_pull_it_is_fedavg_to_the_bit(lab: Any) -> None:
    free, average = lab.run(lab.config({"name": "fedprox", "mu": 0.0})), lab.run(lab.config("fedavg"))
    assert lab.essence(free) == lab.essence(average)
    assert free.final["train/loss"] == average.final["train/loss"]
    assert lab.run(lab.config("fedprox")).weights_hash != average.weights_hash


def test_a_single_step_feels_no_pull(lab: Any) -> None:
    """Value and gradient of the term are exactly 0 at the received weights."""
    once = {"rounds": 2, "batch_size": 160}
    pulled = lab.run(lab.config({"name": "fedprox", "mu": 1e4}, training=once))
    assert pulled.weights_hash == lab.run(lab.config(training=once)).weights_hash


def test_the_pull_is_towards_the_received_weights(lab: Any) -> None:
    budget = {"rounds": 1, "batch_size": 8, "local_epochs": 2, "optimizer": {"weight_decay": 0.0}}
    config = lab.config({"name": "fedprox", "mu": 100.0}, training=budget)
    condition = lab.condition(config)
    parameters = condition.schema.num_parameters

    def moved(config: Any) -> float:
        difference = lab.run(config).weights.values - condition.initial_weights.values
        return float(np.linalg.norm(difference[:parameters]))

    assert moved(config) < 0.7 * moved(lab.config(training=budget))


def test_it_repeats_itself_and_survives_an_interruption(lab: Any, tmp_path: Path) -> None:
    config, file = lab.config("fedprox"), tmp_path / "run.safetensors"
    expected = lab.essence(lab.run(config))
    assert lab.essence(lab.run(config)) == expected
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, recorder=lab.interrupter(at=2), checkpoint=file)
    assert lab.essence(lab.run(config, checkpoint=file)) == expected


@pytest.mark.parametrize("settings", [{"mu": -0.1}, {"mu": float("nan")}, {"strength": 0.1}])
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    assert FedProxConfig().mu == 0.2
    with pytest.raises(ValidationError):
        FedProxConfig.model_validate(settings)
