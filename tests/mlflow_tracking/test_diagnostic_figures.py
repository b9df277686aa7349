"""Figures of identification and relabelling on ordinary and on awkward inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedsir.spectral.identification import IdentificationSettings, MixtureFit, identify
from mlflow_tracking import figures
from mlflow_tracking.figures.identification import component_outline
from mlflow_tracking.identification import evidence
from mlflow_tracking.relabeling import Relabeled, checkpoint_table, label_flows, margin_counts, margin_medians

LABEL = "PHANTOM DATA"


def drawn(figure: Figure, path: Path) -> Figure:
    figures.save_png(figure, path)
    with Image.open(path) as image:
        image.verify()
    return figure


def mixture(columns: tuple[str, ...] = ("mean", "energy", "maximum")) -> MixtureFit:
    size = len(columns)
    covariance = 0.3 * np.ones((size, size)) + 0.7 * np.eye(size)
    return MixtureFit(
        columns,
        centre=np.linspace(0.4, 0.6, size),
        scale=np.linspace(0.1, 0.3, size),
        means=np.stack([np.full(size, -1.0), np.full(size, 1.0)]),
        covariances=np.stack([covariance, 2 * covariance]),
        weights=np.array([0.4, 0.6]),
        clean_component=0,
    )


def test_outline_lies_at_its_distance_in_raw_units() -> None:
    fit = mixture()
    outline = component_outline(fit, 1, ("mean", "maximum"), 2.0)
    z = (outline - fit.centre[[0, 2]]) / fit.scale[[0, 2]] - fit.means[1][[0, 2]]
    marginal = fit.covariances[1][np.ix_([0, 2], [0, 2])]
    np.testing.assert_allclose(np.einsum("pi,ij,pj->p", z, np.linalg.inv(marginal), z), 4.0)
    np.testing.assert_allclose(outline[0], outline[-1])


def test_outline_of_a_flat_descriptor_is_a_line() -> None:
    fit = mixture(("mean", "energy"))
    flat = MixtureFit(**{**vars(fit), "scale": np.array([0.1, 0.0])})
    outline = component_outline(flat, 0, ("mean", "energy"), 1.0)
    assert np.ptp(outline[:, 1]) == pytest.approx(0.0, abs=1e-12)
    assert np.ptp(outline[:, 0]) == pytest.approx(0.2, rel=1e-3)


def lines(figure: Figure) -> list[int]:
    """Outlines in each scatter plot."""
    return [len(axis.lines) for axis in figure.axes[:2]]


def test_components_are_drawn_where_both_descriptors_are_in_the_fit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noisy = np.arange(5) >= 2
    values, p_clean = rng.random((5, 3)), np.where(noisy, 0.1, 0.9)

    def draw(fit: MixtureFit | None) -> Figure:
        return drawn(figures.descriptor_figure(values, p_clean, noisy, noisy, LABEL, fit), tmp_path / "x.png")

    assert lines(draw(mixture())) == [4, 4]
    assert lines(draw(mixture(("mean", "energy")))) == [4, 0]
    assert lines(draw(mixture(("maximum",)))) == [0, 0]
    assert lines(draw(None)) == [0, 0]


def test_a_wide_component_does_not_hide_the_clients(tmp_path: Path) -> None:
    noisy = np.array([False, True, True])
    values = np.array([[0.4, 0.4, 0.5], [0.5, 0.5, 0.6], [0.6, 0.6, 0.7]])
    wide = MixtureFit(**{**vars(mixture()), "covariances": np.stack([np.eye(3), 1e6 * np.eye(3)])})
    figure = drawn(figures.descriptor_figure(values, np.ones(3), noisy, noisy, LABEL, wide), tmp_path / "x.png")
    left, right = figure.axes[0].get_xlim()
    assert right - left < 1.0


@pytest.mark.parametrize("case", ["nothing known", "one client", "all clean", "no verdict"])
def test_awkward_verdicts_are_drawn(case: str, tmp_path: Path) -> None:
    clients = 1 if case == "one client" else 4
    similarity = np.full((clients, 2, 2), np.nan if case == "nothing known" else 0.4)
    verdict = identify(similarity, IdentificationSettings(), seed=0)
    noisy = np.zeros(clients, dtype=bool)
    predicted = None if case == "no verdict" else ~verdict.clean
    threshold = None if case == "no verdict" else 0.5
    drawn(
        figures.descriptor_figure(
            verdict.descriptors, verdict.p_clean, noisy, predicted, LABEL, verdict.mixture, threshold
        ),
        tmp_path / "descriptors.png",
    )
    figure = figures.posterior_figure(verdict.p_clean, noisy, predicted, LABEL, evidence("class_losses"))
    drawn(figure, tmp_path / "posterior.png")
    assert figure.axes[0].get_xlabel() == "share of votes for clean"


def relabeled(clients: int, classes: int, checkpoints: int, undecided: bool = False) -> Relabeled:
    rng = np.random.default_rng(0)
    true, observed = ([rng.integers(0, classes, 30) for _ in range(clients)] for _ in range(2))
    history = tuple((t, [rng.integers(0, classes, 30) for _ in range(clients)]) for t in range(checkpoints))
    margins = tuple(np.where(undecided, np.nan, rng.random((30, 2))).astype(np.float32) for _ in range(clients))
    return Relabeled(tuple("abcdefghijkl"[:classes]), tuple(range(clients)), true, observed, history, margins)


@pytest.mark.parametrize(("clients", "classes", "checkpoints"), [(1, 2, 1), (3, 4, 16), (2, 12, 60), (0, 2, 1)])
def test_relabelling_is_drawn(clients: int, classes: int, checkpoints: int, tmp_path: Path) -> None:
    done = relabeled(clients, classes, checkpoints)
    figure = drawn(figures.checkpoint_figure(checkpoint_table(done), LABEL), tmp_path / "checkpoints.png")
    assert all(len(line.get_xdata()) == checkpoints for line in figure.axes[0].lines)  # type: ignore[arg-type]
    flows = label_flows(done, done.corrected)
    figure = drawn(figures.flow_figure(flows, done.class_names, "Labels", LABEL), tmp_path / "flow.png")
    assert [axis.get_title() for axis in figure.axes[:3]] == list(flows)
    histogram = margin_counts(done)
    assert (histogram is None) == (clients == 0)
    if histogram is not None:
        drawn(figures.margin_figure(*histogram, margin_medians(done), LABEL), tmp_path / "margins.png")


def test_figures_without_checkpoints_or_images(tmp_path: Path) -> None:
    empty = checkpoint_table(relabeled(2, 2, 0))
    drawn(figures.checkpoint_figure(empty, LABEL), tmp_path / "checkpoints.png")
    edges, counts = np.tile(np.linspace(0, 1, 5), (2, 1)), np.zeros((2, 4, 4), dtype=np.int64)
    nothing: Any = np.full((2, 4), np.nan)
    drawn(figures.margin_figure(edges, counts, nothing, LABEL), tmp_path / "margins.png")
