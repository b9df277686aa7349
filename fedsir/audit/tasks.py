"""Client tasks of an audit: features that no label has touched, and the scores behind a proposed label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.clients.training import forward_pass
from fedsir.spectral.relabeling import spectral_scores


@dataclass(frozen=True)
class ExtractFeatures:
    """Features (n, d) float32 of the client's images under the broadcast `weights`; plain transform."""

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[NDArray[np.float32]]:
        client.runtime.binding.load(broadcast["weights"])
        return ClientResult(forward_pass(client, "features").cpu().numpy())


@dataclass(frozen=True)
class ScoreImages:
    """S_R and S_N (2, n, C) float64 of unit features under broadcast `references` and `reference_model`;
    NaN for images whose features have no direction, which `relabel` leaves alone as well."""

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[NDArray[np.float64]]:
        client.runtime.binding.load(broadcast["reference_model"])
        features = forward_pass(client, "features").cpu().numpy().astype(np.float64)
        length = np.linalg.norm(features, axis=1)
        decidable = np.isfinite(length) & (length > 0)
        unit = np.full_like(features, np.nan)
        unit[decidable] = features[decidable] / length[decidable, None]
        return ClientResult(np.stack(spectral_scores(unit, broadcast["references"])))
