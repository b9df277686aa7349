"""Who was taken for noisy, and from what: class similarities, descriptors, the fitted mixture, posteriors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedsir.spectral.descriptors import DESCRIPTOR_NAMES
from fedsir.spectral.identification import MixtureFit
from mlflow_tracking.figures.base import (
    AMOUNTS,
    CLEAN,
    GREY,
    MAX_ANNOTATED_CLASSES,
    MISJUDGED,
    NOISY,
    UNOBSERVED,
    Array,
    Flags,
    annotate,
    light_grid,
    new_figure,
)


def similarity_figure(
    similarity: Array, noisy: Flags, predicted_noisy: Flags | None, class_names: Sequence[str], label: str
) -> Figure:
    """Grid of the (K, C, C) class-similarity matrices; frame colour tells who is truly noisy."""
    clients, classes, _ = similarity.shape
    columns = min(clients, 5 if clients <= 15 else 6)
    rows = -(-clients // columns)
    size = max(6.8, 1.75 * columns + 1.2), 1.9 * rows + 1.5
    figure = new_figure(*size, "Similarity between the classes of each client", label)
    axes = figure.subplots(rows, columns, squeeze=False)
    off_diagonal = similarity[:, ~np.eye(classes, dtype=bool)]
    known = off_diagonal[np.isfinite(off_diagonal)]
    # The diagonal is 1 by construction, so the scale follows the values that tell clients apart.
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    high = max(high, low + 1e-6)
    palette = colormaps[AMOUNTS].with_extremes(bad=UNOBSERVED, over="#FFFFFF")
    for position, axis in enumerate(axes.flat):
        if position >= clients:
            axis.set_axis_off()
            continue
        matrix = similarity[position]
        image = axis.imshow(matrix, cmap=palette, vmin=low, vmax=high)
        if classes <= MAX_ANNOTATED_CLASSES:
            text = [
                ["" if np.isnan(v) or i == j else f"{v:.2f}" for j, v in enumerate(r)] for i, r in enumerate(matrix)
            ]
            annotate(axis, (matrix - low) / (high - low), text, 6)
        _frame_client(axis, position, bool(noisy[position]), _verdict(predicted_noisy, position))
        first_column, last_row = position % columns == 0, position + columns >= clients
        axis.set_xticks(range(classes), class_names, rotation=90, fontsize=7)
        axis.set_yticks(range(classes), class_names, fontsize=7)
        # Labels that are not shown are not laid out either.
        axis.tick_params(labelbottom=last_row, labelleft=first_column)
    figure.colorbar(image, ax=axes, label="similarity (off the diagonal)", fraction=0.025, pad=0.02)
    _status_legend(figure, shapes=False, unobserved=bool(np.isnan(similarity).any()))
    return figure


def descriptor_figure(
    descriptors: Array,
    p_clean: Array,
    noisy: Flags,
    predicted_noisy: Flags | None,
    label: str,
    mixture: MixtureFit | None = None,
    threshold: float | None = 0.5,
) -> Figure:
    """(K, 3) descriptors mean, energy, maximum as two scatter plots; the (K,) posterior of being clean.

    mixture: its components are drawn as ellipses at one and two standard deviations, where both descriptors of a
    plot are in the fit. threshold: posterior from which a client counts as clean, if there is such a thing.
    """
    clients = len(noisy)
    size = 12.0, max(4.8, 1.8 + 0.17 * clients)
    figure = new_figure(*size, "Spectral descriptors and verdict per client", label)
    mean_energy, mean_maximum, posterior = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    wrong = np.zeros(clients, dtype=bool) if predicted_noisy is None else predicted_noisy != noisy
    drawn = False
    for axis, column in ((mean_energy, 1), (mean_maximum, 2)):
        for k in np.argsort(wrong, kind="stable"):  # misjudged clients last, on top
            x, y = float(descriptors[k, 0]), float(descriptors[k, column])
            _client_marker(axis, x, y, k, noisy, predicted_noisy, 60)
            if wrong[k] and np.isfinite([x, y]).all():  # numbering all would bury the dense clusters
                axis.annotate(
                    f"client {k}", (x, y), (8, 8), textcoords="offset points", fontsize=8, zorder=4,
                    bbox={"boxstyle": "round,pad=0.2", "fc": "w", "ec": "none", "alpha": 0.8},
                )  # fmt: skip
        names = DESCRIPTOR_NAMES[0], DESCRIPTOR_NAMES[column]
        axis.set(xlabel="mean similarity", ylabel=f"{names[1]} of similarities")
        axis.margins(0.12)
        light_grid(axis)
        if mixture is not None and set(names) <= set(mixture.columns):
            drawn = True
            _draw_components(axis, mixture, names, descriptors[:, [0, column]])
    _draw_posterior(posterior, p_clean, noisy, predicted_noisy, threshold)
    posterior.set_xlabel("posterior of being clean")
    _status_legend(figure, shapes=predicted_noisy is not None, components=drawn)
    return figure


def posterior_figure(p_clean: Array, noisy: Flags, predicted_noisy: Flags | None, label: str, evidence: str) -> Figure:
    """(K,) `evidence` for clean between 0 and 1, for methods that judge clients without descriptors."""
    figure = new_figure(7.6, max(4.0, 1.8 + 0.17 * len(noisy)), "Verdict per client", label)
    axis = figure.subplots()
    _draw_posterior(axis, p_clean, noisy, predicted_noisy, None)
    axis.set_xlabel(evidence)
    _status_legend(figure, shapes=predicted_noisy is not None)
    return figure


def _draw_posterior(
    axis: Axes, p_clean: Array, noisy: Flags, predicted_noisy: Flags | None, threshold: float | None
) -> None:
    clients = len(noisy)
    if threshold is not None:
        axis.axvline(threshold, color=GREY, linewidth=1, linestyle="--")
    for k in range(clients):
        if np.isnan(p_clean[k]):
            axis.annotate("not in the fit", (0.02, k), va="center", fontsize=7, color=GREY)
        else:
            axis.plot([0, p_clean[k]], [k, k], color="#CCCCCC", linewidth=1.2, zorder=1)
            _client_marker(axis, p_clean[k], k, k, noisy, predicted_noisy, 45)
    axis.set(ylabel="client", xlim=(-0.06, 1.06), ylim=(clients - 0.4, -0.6))
    axis.set_yticks(range(clients))
    axis.tick_params(axis="y", labelsize=7 if clients > 15 else 9)


def component_outline(
    mixture: MixtureFit, component: int, names: tuple[str, str], deviations: float, points: int = 181
) -> Array:
    """(points, 2) closed outline of one component at that many standard deviations, in units of the descriptors.

    The marginal of a Gaussian over two of its coordinates has the corresponding rows and columns of mean and
    covariance; z-scores z become centre + scale z.
    """
    pick = [mixture.columns.index(name) for name in names]
    scale = mixture.scale[pick]
    covariance = mixture.covariances[component][np.ix_(pick, pick)] * np.outer(scale, scale)
    values, vectors = np.linalg.eigh(covariance)
    angle = np.linspace(0.0, 2.0 * np.pi, points)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    radii = deviations * np.sqrt(np.maximum(values, 0.0))
    middle = mixture.centre[pick] + scale * mixture.means[component][pick]
    return np.asarray(middle + (vectors @ (radii[:, None] * circle)).T, dtype=np.float64)


def _draw_components(axis: Axes, mixture: MixtureFit, names: tuple[str, str], points: Array) -> None:
    for component, deviations in product(range(2), (1.0, 2.0)):
        outline = component_outline(mixture, component, names, deviations)
        clean = component == mixture.clean_component
        axis.plot(
            *outline.T, color=CLEAN if clean else NOISY, linestyle="-" if clean else "--",
            linewidth=1.4 if deviations == 1 else 0.8, zorder=2,
        )  # fmt: skip
    # A component that claims few clients can be far wider than all of them together.
    known = points[np.all(np.isfinite(points), axis=1)]
    if len(known):
        low, high = known.min(axis=0), known.max(axis=0)
        room = 0.6 * np.maximum(high - low, 1e-6)
        (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
        axis.set_xlim(max(left, low[0] - room[0]), min(right, high[0] + room[0]))
        axis.set_ylim(max(bottom, low[1] - room[1]), min(top, high[1] + room[1]))


def _verdict(predicted_noisy: Flags | None, client: int) -> bool | None:
    return None if predicted_noisy is None else bool(predicted_noisy[client])


def _frame_client(axis: Axes, client: int, noisy: bool, verdict: bool | None) -> None:
    colour = NOISY if noisy else CLEAN
    wrong = verdict is not None and verdict != noisy
    title = f"{client} {'noisy' if noisy else 'clean'}" + (" (misjudged)" if wrong else "")
    axis.set_title(title, fontsize=8, color=colour, fontweight="bold" if wrong else "normal", pad=3)
    for spine in axis.spines.values():
        spine.set(color=colour, linewidth=2.2)


def _client_marker(
    axis: Axes, x: float, y: float, client: int, noisy: Flags, predicted_noisy: Flags | None, size: float
) -> None:
    verdict = _verdict(predicted_noisy, client)
    truth = bool(noisy[client])
    wrong = verdict is not None and verdict != truth
    axis.scatter(
        [x], [y], s=size, marker="s" if verdict else "o", color=NOISY if truth else CLEAN,
        edgecolors=MISJUDGED if wrong else "w", linewidths=2.0 if wrong else 0.6,
        alpha=1.0 if wrong else 0.85, zorder=3,
    )  # fmt: skip


def _status_legend(figure: Figure, shapes: bool, unobserved: bool = False, components: bool = False) -> None:
    def mark(colour: str, text: str, marker: str = "o", edge: str = "none") -> Line2D:
        return Line2D(
            [], [], linestyle="none", marker=marker, markersize=8, color=colour, markeredgecolor=edge,
            markeredgewidth=1.8, label=text,
        )  # fmt: skip

    handles = [mark(CLEAN, "truly clean"), mark(NOISY, "truly noisy")]
    if shapes:
        handles.append(mark("w", "judged clean", "o", GREY))
        handles.append(mark("w", "judged noisy", "s", GREY))
        handles.append(mark("#CCCCCC", "misjudged", "o", MISJUDGED))
    if unobserved:
        handles.append(mark(UNOBSERVED, "class not observed", "s"))
    if components:
        handles.append(Line2D([], [], color=CLEAN, label="clean component, 1 and 2 SD"))
        handles.append(Line2D([], [], color=NOISY, linestyle="--", label="noisy component, 1 and 2 SD"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
