"""Binds a network's tensors to one contiguous vector, so that loading and reading are single copies."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from fedsir.models.flat import FlatEntry, FlatSchema, FlatWeights


class FlatBinding:
    """Makes every parameter and floating buffer of `module` a view of one float32 vector.

    Must be created after the module is on its device; the module keeps working as before.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.named_parameters())
        floating = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
        self._counters: list[Tensor] = []
        counter_names: list[str] = []
        for name, buffer in module.named_buffers():
            if not buffer.is_floating_point():
                if buffer.numel() != 1:
                    raise ValueError(f"integer buffer {name} has {buffer.numel()} entries, expected one counter")
                counter_names.append(name)
                self._counters.append(buffer)
        entries: list[FlatEntry] = []
        start = 0
        for position, (name, tensor) in enumerate([*parameters, *floating]):
            if tensor.dtype != torch.float32:
                raise ValueError(f"tensor {name} is {tensor.dtype}, expected torch.float32")
            entries.append(FlatEntry(name, tuple(tensor.shape), start, trainable=position < len(parameters)))
            start += prod(tensor.shape)
        self.schema = FlatSchema(tuple(entries), tuple(counter_names))
        device = parameters[0][1].device
        self._values = torch.empty(start, dtype=torch.float32, device=device)
        with torch.no_grad():
            for entry, (_, tensor) in zip(entries, [*parameters, *floating], strict=True):
                view = self._values[entry.start : entry.stop].view(entry.shape)
                view.copy_(tensor)
                tensor.data = view

    @torch.no_grad()
    def load(self, weights: FlatWeights) -> None:
        """Set the network's state; raises ValueError when the vector belongs to another schema."""
        if weights.values.shape != self._values.shape or len(weights.counters) != len(self._counters):
            raise ValueError(
                f"weights have {weights.values.size} values and {weights.counters.size} counters, "
                f"the network has {self._values.numel()} and {len(self._counters)}"
            )
        if self._values.device.type == "cpu":
            # Arrays from the object store are read-only, which `torch.from_numpy` warns about; NumPy just reads.
            np.copyto(self._values.numpy(), weights.values)
        else:
            self._values.copy_(torch.from_numpy(weights.values.copy()))
        for counter, value in zip(self._counters, weights.counters, strict=True):
            counter.fill_(int(value))

    @torch.no_grad()
    def read(self) -> FlatWeights:
        """The network's present state as fresh arrays."""
        values = self._values.detach().cpu().numpy().copy()
        counters = np.array([int(c.item()) for c in self._counters], dtype=np.int64)
        return FlatWeights(values, counters)


def weights_of(module: nn.Module) -> tuple[FlatWeights, FlatSchema]:
    """State and schema of a module on the CPU (binds the module)."""
    binding = FlatBinding(module)
    return binding.read(), binding.schema
