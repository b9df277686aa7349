"""Tables of one run as data frames: pure functions of arrays.

The federation itself is tabulated by `fedsir.federation.report`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedsir.federation.federation import Federation, Truth
from fedsir.spectral.identification import Identification

Labels = Sequence[NDArray[np.int64]]


def class_counts(labels: Labels, num_classes: int) -> NDArray[np.int64]:
    """(K, C) images per client and class."""
    return np.stack([np.bincount(y, minlength=num_classes) for y in labels]).astype(np.int64)


def client_table(
    federation: Federation,
    truth: Truth,
    labels: Labels | None,
    predicted_noisy: NDArray[np.bool_] | None,
    identification: Identification | None,
) -> pd.DataFrame:
    """One row per client with the method's verdict beside the truth; empty where the method has none.

    corrupted: observed label is wrong. relabelled: the training label differs from the observed one; of
    these, recovered got the true label and spoiled were right before. still_wrong: training label is wrong.
    """
    final = federation.observed if labels is None else labels
    clients = federation.num_clients
    nothing = np.full(clients, np.nan)
    changed = [now != seen for now, seen in zip(final, federation.observed, strict=True)]
    right = [now == true for now, true in zip(final, truth.labels, strict=True)]
    was_right = [seen == true for seen, true in zip(federation.observed, truth.labels, strict=True)]
    descriptors = np.full((clients, 3), np.nan) if identification is None else identification.descriptors
    return pd.DataFrame(
        {
            "client": np.arange(clients),
            "images": federation.sizes,
            "truly_noisy": truth.noisy,
            "predicted_noisy": nothing if predicted_noisy is None else predicted_noisy,
            "p_clean": nothing if identification is None else identification.p_clean,
            "similarity_mean": descriptors[:, 0],
            "similarity_energy": descriptors[:, 1],
            "similarity_max": descriptors[:, 2],
            "corrupted": _differing(federation.observed, truth.labels),
            "relabelled": [int(c.sum()) for c in changed],
            "recovered": [int((c & r).sum()) for c, r in zip(changed, right, strict=True)],
            "spoiled": [int((c & w).sum()) for c, w in zip(changed, was_right, strict=True)],
            "still_wrong": _differing(final, truth.labels),
        }
    )


def label_table(
    federation: Federation,
    truth: Truth,
    labels: Labels | None,
    margins: Sequence[NDArray[np.floating]] | None = None,
    agreement: Sequence[NDArray[np.bool_]] | None = None,
) -> pd.DataFrame:
    """One row per training image: client, position in the training set, and its label by name.

    `corrected` is the label trained on at the end; equal to `observed` where the method changed nothing.
    margins: per client (n_k, 2) adds `S_R margin` and `S_N margin`; agreement: per client (n_k,) adds
    `criteria_agree`, empty for images without a decision.
    """
    names = np.array(federation.class_names)
    final = federation.observed if labels is None else labels
    table = pd.DataFrame(
        {
            "client": np.repeat(np.arange(federation.num_clients), federation.sizes),
            "index": np.concatenate(federation.indices),
            "true": names[np.concatenate(truth.labels)],
            "observed": names[np.concatenate(federation.observed)],
            "corrected": names[np.concatenate(final)],
        }
    )
    if margins is not None:
        pooled = np.concatenate(margins)
        table["S_R margin"], table["S_N margin"] = pooled[:, 0], pooled[:, 1]
        if agreement is not None:
            agreed = np.concatenate(agreement).astype(object)
            agreed[np.isnan(pooled).any(axis=1)] = None
            table["criteria_agree"] = agreed
    return table


def class_table(confusion: NDArray[np.int64], class_names: Sequence[str]) -> pd.DataFrame:
    """Figures per class from a (C, C) confusion matrix with true classes in rows.

    0 where a class is never predicted or never present, as scikit-learn's `zero_division=0`.
    """
    hits = np.diag(confusion).astype(np.float64)
    support, predicted = confusion.sum(axis=1), confusion.sum(axis=0)
    return pd.DataFrame(
        {
            "class": list(class_names),
            "precision": hits / np.maximum(predicted, 1),
            "recall": hits / np.maximum(support, 1),
            "f1": 2 * hits / np.maximum(predicted + support, 1),
            "support": support,
            "predicted": predicted,
        }
    )


def prediction_table(true: NDArray[np.int64], predicted: NDArray[np.int64], class_names: Sequence[str]) -> pd.DataFrame:
    """One row per held-out image: its position in the test set, its class by name, and what it is taken for.

    predicted: (M, N); a column `predicted` for a global model (M = 1), `client_0`, `client_1`, ... for client models.
    """
    names = np.array(class_names)
    columns = ["predicted"] if len(predicted) == 1 else [f"client_{k}" for k in range(len(predicted))]
    return pd.DataFrame(
        {
            "image": np.arange(len(true)),
            "true": names[true],
            **{column: names[of_model] for column, of_model in zip(columns, predicted, strict=True)},
        }
    )


def _differing(left: Labels, right: Labels) -> NDArray[np.int64]:
    """(K,) number of differing labels per client."""
    return np.array([int((a != b).sum()) for a, b in zip(left, right, strict=True)], dtype=np.int64)
