"""What speaks against a site's labels, and what only says that its images look different.

Everything here works on features of one network that no label of the consortium has touched, so that thousands of
homogeneous splits cost seconds. Three statistics, each high when something is odd:

- disagreement: how badly a site's labels fit what the *other* sites' labels say about its images;
- inconsistency: how badly they fit what the site's own other patients say;
- shift: how far the site's images lie from those of the others, in directions that no label can move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

FOLDS = 5
WORST_LOG = -5.0
"""Log-probabilities are cut here: one image with an impossible label must not outweigh a site."""

_OFFSET_PASSES = 3


def principal_components(features: NDArray[np.floating], components: int) -> Array:
    """(N, m) scores of standardised features (N, d) on their first m <= `components` principal axes.

    Columns without spread are dropped. No label is used.
    """
    rows = np.asarray(features, dtype=np.float64)
    spread = rows.std(axis=0)
    rows = (rows - rows.mean(axis=0))[:, spread > 1e-9] / spread[spread > 1e-9]
    squares, axes = np.linalg.eigh(rows.T @ rows / len(rows))
    return np.asarray(rows @ axes[:, ::-1][:, : min(components, int(np.count_nonzero(squares > 1e-9)))])


def without_site_offsets(x: Array, labels: Ints, sites: Ints, num_sites: int, num_classes: int) -> Array:
    """Features (N, m) less each site's own offset: x_i = class mean + site offset + rest, fitted by turns.

    A scanner that moves all of a site's images alike leaves no trace in the result. A site's class mix leaves
    none in its offset.
    """
    offsets = np.zeros((num_sites, x.shape[1]))
    for _ in range(_OFFSET_PASSES):
        means = _group_means(x - offsets[sites], labels, num_classes)
        offsets = _group_means(x - means[labels], sites, num_sites)
    return x - offsets[sites]


def disagreement(log_p: Array, labels: Ints, sites: Ints, num_sites: int) -> Array:
    """(K,) mean of -log p(observed label) over a site's images; NaN for sites without a comparable image."""
    own = -np.maximum(log_p[np.arange(len(labels)), labels], WORST_LOG)
    return _site_means(own, sites, num_sites)


def disagreement_share(log_p: Array, labels: Ints, sites: Ints, num_sites: int) -> Array:
    """(K,) share of a site's images to which the other sites would give another label."""
    known = np.isfinite(log_p[np.arange(len(labels)), labels])
    best = np.where(np.isfinite(log_p), log_p, -np.inf).argmax(axis=1)
    return _site_means(np.where(known, (best != labels).astype(np.float64), np.nan), sites, num_sites)


def cross_site_log_p(
    x: Array,
    labels: Ints,
    sites: Ints,
    num_sites: int,
    num_classes: int,
    shrinkage: float,
    min_count: int,
    judged: Sequence[int] | None = None,
) -> Array:
    """(N, C) log-probabilities of each image's class by a linear discriminant of all *other* sites; equal priors.

    x: (N, m) features less site offsets. Classes of which the other sites hold fewer than `min_count` images are
    NaN: nobody can say anything about them. judged: sites whose images are of interest, by default all; those of
    others stay NaN.
    """
    log_p = np.full((len(x), num_classes), np.nan)
    cells = sites * num_classes + labels
    members = _memberships(cells, num_sites * num_classes)
    counts = members.sum(axis=1).reshape(num_sites, num_classes)
    sums = (members @ x).reshape(num_sites, num_classes, x.shape[1])
    grams = np.stack([x[sites == k].T @ x[sites == k] for k in range(num_sites)])
    all_counts, all_sums, all_grams = counts.sum(axis=0), sums.sum(axis=0), grams.sum(axis=0)
    for k in range(num_sites) if judged is None else judged:
        n = all_counts - counts[k]
        known = np.flatnonzero(n >= min_count)
        if len(known) < 2:
            continue
        total = all_sums - sums[k]
        seen = n > 0
        means = total[seen] / n[seen, None]
        scatter = all_grams - grams[k] - (means * n[seen, None]).T @ means
        covariance = shrunk(scatter / max(n.sum(), 1.0), shrinkage)
        log_p[np.ix_(sites == k, known)] = _discriminant(x[sites == k], total[known] / n[known, None], covariance)
    return log_p


def inconsistency(
    x: Array, labels: Ints, sites: Ints, patients: Ints, judged: Sequence[int], shrinkage: float, folds: Ints
) -> Array:
    """(J,) mean of 1 - p(observed label) over each `judged` site's images, by a discriminant of its other patients.

    folds: (P,) int64 in 0..FOLDS-1 for patient indices 0..P-1. NaN for sites with one class. Nothing that is the
    same for all of a site's images, whatever its scanner does to them, enters.
    """
    out = np.full(len(judged), np.nan)
    for position, k in enumerate(judged):
        own = sites == k
        classes, y = np.unique(labels[own], return_inverse=True)
        if len(classes) < 2:
            continue
        rows, fold = x[own], folds[patients[own]]
        doubt = np.full(len(y), np.nan)
        for f in range(FOLDS):
            held, rest = fold == f, fold != f
            present = np.unique(y[rest])
            if not held.any() or len(present) < 2:
                continue
            means = np.stack([rows[rest & (y == c)].mean(axis=0) for c in present])
            centred = rows[rest] - means[np.searchsorted(present, y[rest])]
            log_p = _discriminant(rows[held], means, shrunk(centred.T @ centred / rest.sum(), shrinkage))
            column = np.searchsorted(present, y[held]).clip(max=len(present) - 1)
            p = np.exp(log_p[np.arange(len(column)), column])
            doubt[held] = np.where(present[column] == y[held], 1.0 - p, np.nan)
        if np.isfinite(doubt).any():
            out[position] = np.nanmean(doubt)
    return out


def shift(x: Array, labels: Ints, sites: Ints, num_sites: int, num_classes: int, shrinkage: float) -> Array:
    """(K,) squared distance of a site's mean image from the median site, where labels cannot reach.

    Distances are in units of the spread within classes, in the directions orthogonal to all differences between
    class means: neither another class mix nor wrong labels move a mean there. Against the median site rather
    than the rest, so that one shifted site does not make the others look shifted.
    """
    means = _group_means(x, labels, num_classes)
    centred = x - means[labels]
    squares, axes = np.linalg.eigh(shrunk(centred.T @ centred / len(x), shrinkage))
    whitening = axes / np.sqrt(squares)
    seen = np.unique(labels)
    contrasts = (means[seen] - means[seen].mean(axis=0)) @ whitening
    _, sizes, basis = np.linalg.svd(contrasts, full_matrices=False)
    basis = basis[sizes > 1e-9 * max(float(sizes.max()), 1e-12)]
    rows = x @ whitening
    site_means = _group_means(rows - rows @ basis.T @ basis, sites, num_sites)
    return np.asarray(np.square(site_means - np.median(site_means, axis=0)).sum(axis=1))


def shrunk(covariance: Array, shrinkage: float) -> Array:
    """A covariance (m, m) drawn towards the isotropic one of equal trace; never singular."""
    m = len(covariance)
    level = float(np.trace(covariance)) / m
    return (1.0 - shrinkage) * covariance + (shrinkage * level + 1e-12) * np.eye(m)


def _discriminant(rows: Array, means: Array, covariance: Array) -> Array:
    """(n, C') log-probabilities for equal priors and one covariance."""
    directions = np.linalg.solve(covariance, means.T)
    scores = rows @ directions - 0.5 * (means.T * directions).sum(axis=0)
    scores -= scores.max(axis=1, keepdims=True)
    return np.asarray(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)))


def _group_means(x: Array, groups: Ints, count: int) -> Array:
    """(count, m) mean of each group's rows, 0 for empty groups."""
    members = _memberships(groups, count)
    return np.asarray(members @ x / np.maximum(members.sum(axis=1), 1.0)[:, None])


def _memberships(groups: Ints, count: int) -> Array:
    """(count, N) 1 where a row belongs to a group."""
    members = np.zeros((count, len(groups)))
    members[groups, np.arange(len(groups))] = 1.0
    return members


def _site_means(values: Array, sites: Ints, num_sites: int) -> Array:
    known = np.isfinite(values)
    counts = np.bincount(sites[known], minlength=num_sites)
    sums = np.bincount(sites[known], values[known], minlength=num_sites)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
