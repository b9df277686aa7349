"""A federation as a table for people: images per client and class before and after corruption."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedsir.federation.federation import Federation, Truth


def federation_rows(federation: Federation, truth: Truth) -> list[dict[str, int | str]]:
    """One row per client: client, status, images, wrong labels, then per class true and observed counts.

    Class columns are called `<class> true` and `<class> observed`.
    """
    num_classes = federation.num_classes
    rows: list[dict[str, int | str]] = []
    for k, (observed, labels) in enumerate(zip(federation.observed, truth.labels, strict=True)):
        row: dict[str, int | str] = {
            "client": k,
            "status": "noisy" if truth.noisy[k] else "clean",
            "images": len(labels),
            "wrong labels": int(np.count_nonzero(observed != labels)),
        }
        before = np.bincount(labels, minlength=num_classes).tolist()
        after = np.bincount(observed, minlength=num_classes).tolist()
        for name, true_count, observed_count in zip(federation.class_names, before, after, strict=True):
            row[f"{name} true"] = true_count
            row[f"{name} observed"] = observed_count
        rows.append(row)
    return rows


def federation_table(federation: Federation, truth: Truth) -> pd.DataFrame:
    """`federation_rows` as a data frame indexed by client."""
    return pd.DataFrame(federation_rows(federation, truth)).set_index("client")
