"""Adam on the CPU without what surrounds its kernel: small networks have many tensors and few numbers in them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def adam(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
    """The Adam that clients use on a device; `fedsir.clients.training.reset_optimizer` gives it its rates."""
    return LeanAdam(parameters) if device.type == "cpu" else torch.optim.Adam(parameters, lr=1.0, fused=True)


class LeanAdam(torch.optim.Adam):
    """`torch.optim.Adam(fused=True)` for parameters on the CPU: the same kernel on the same tensors, the same bits.

    torch collects tensors and state anew at every step, tells its profiler of it, and counts the steps of every
    parameter; that takes longer than the kernel where tensors are small. Here they are counted together, so either all
    parameters must have a gradient or none, in which case nothing is done.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """The rates are placeholders."""
        self._tensors: list[Tensor] = list(parameters)
        super().__init__(self._tensors, lr=1.0, fused=True)
        # Moments of all parameters lie together, so that they are set to zero at once.
        sizes = [parameter.numel() for parameter in self._tensors]
        self._moments = torch.zeros(2, sum(sizes))
        self._first, self._second = (
            [part.view(p.shape) for part, p in zip(moment.split(sizes), self._tensors, strict=True)]
            for moment in self._moments
        )
        self._count = torch.zeros(())
        # Everything that steps leave behind, once: who makes an optimizer a fresh one fills it with zeros.
        self.state[self._tensors[0]] = {"step": self._count, "moments": self._moments}

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - torch's signature
        for parameter in self._tensors:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        """One step with the present gradients. Raises ValueError where only some parameters have one."""
        gradients = [parameter.grad for parameter in self._tensors if parameter.grad is not None]
        if not gradients:
            return
        if len(gradients) < len(self._tensors):
            raise ValueError(
                f"{len(self._tensors) - len(gradients)} of {len(self._tensors)} parameters lack a gradient"
            )
        (group,) = self.param_groups
        self._count.add_(1)
        torch._fused_adam_(
            self._tensors,
            gradients,
            self._first,
            self._second,
            [],
            [self._count] * len(gradients),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    # torch would wrap it for its profiler otherwise.
    step.hooked = True  # type: ignore[attr-defined]
