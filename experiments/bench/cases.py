"""The federations that are measured, as the values of run files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]


def settings(
    backbone: str,
    pixels: int,
    clients: int,
    images: int,
    rounds: int,
    method: Any = "fedavg",
    test_images: int | None = None,
    actors: int | str = "auto",
    participation: float = 1.0,
) -> dict[str, Any]:
    """A phantom federation of `images` images, dealt nearly evenly, batches of 16, one local epoch a round.

    test_images: a fifth of `images` by default.
    """
    return {
        "name": "bench",
        "data": {
            "source": "phantom",
            "image_size": pixels,
            "train_images": images,
            "test_images": test_images or max(1, images // 5),
        },
        "federation": {
            "clients": clients,
            "clean_clients": max(1, clients // 10),
            "clean_selection": "random",
            "public_pool": min(64, images // 20),
            # Some clients of a large federation hold a handful of images; one is the least that can be trained on.
            "partition": {"alpha": 10.0, "min_client_size": 1},
        },
        # Not trained ones, which would have to be downloaded.
        "model": {"backbone": backbone, "weights": "random"},
        "training": {"rounds": rounds, "batch_size": 16, "participation": participation},
        "method": method,
        "execution": {"device": "cpu", "actors": actors},
    }
