"""From geometry to grey values.

Every boundary is a soft step of one pixel's height, the exact box-filtered image of a horizontal edge:
layers thinner than a pixel keep their share of brightness at any image size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsir.data.phantom.anatomy import (
    DEPTH_MM,
    FIELD_MM,
    Anatomy,
    Placement,
    bruch_mm,
    healthy_layers,
    lateral_mm,
)
from fedsir.data.phantom.lesions import Lesions, mounds, plateau, smooth

Image = NDArray[np.float32]

# Layers from NFL to interdigitation zone as in LAYER_NAMES; a dome's filling is set by the lesion.
_VITREOUS = 0.02
_LAYER_GREY = (0.62, 0.40, 0.25, 0.38, 0.19, 0.72, 0.42)
_RPE_GREY = 0.86
_FLUID_GREY = 0.05
_CHOROID_GREY = 0.46


@dataclass(frozen=True)
class Scan:
    """One B-scan before it is drawn; the lesions are those that it sees."""

    anatomy: Anatomy
    placement: Placement
    lesions: Lesions


@dataclass(frozen=True)
class Profiles:
    """Curves along a scan, each (W,) in mm.

    x: position from the fovea. tops: (8, W) upper boundaries of the layers in the order of LAYER_NAMES, so
    tops[0] is the ILM and tops[7] the RPE's. rpe: lower boundary of the RPE, bruch: Bruch's membrane. fluid:
    height of subretinal fluid, which lies directly on the RPE. elevation: height of the RPE. atrophy: 0..1.
    """

    x: NDArray[np.float64]
    tops: NDArray[np.float64]
    rpe: NDArray[np.float64]
    bruch: NDArray[np.float64]
    fluid: NDArray[np.float64]
    elevation: NDArray[np.float64]
    atrophy: NDArray[np.float64]


def profiles(scan: Scan, columns: int) -> Profiles:
    """All curves of a scan at `columns` lateral positions."""
    anatomy, placement, lesions = scan.anatomy, scan.placement, scan.lesions
    x = lateral_mm(columns, placement)
    layers = healthy_layers(anatomy, placement, x)
    swelling = 1.0 + mounds(x, placement.plane, lesions.swelling)
    layers[1] *= 1.0 + 0.25 * (swelling - 1.0)
    layers[2] *= swelling
    layers[4] *= swelling
    atrophy = plateau(x, placement.plane, lesions.atrophy)
    layers[4] *= 1.0 - 0.55 * smooth(atrophy, 0.15)
    layers[5:7] *= 1.0 - 0.8 * atrophy
    layers[7] *= 1.0 - 0.5 * atrophy

    bruch = bruch_mm(anatomy, placement, x)
    elevation = mounds(x, placement.plane, lesions.domes)
    fluid = mounds(x, placement.plane, lesions.fluid)
    lift = elevation + fluid
    tops = np.empty_like(layers)
    rpe = bruch - elevation
    tops[7] = rpe - layers[7]
    tops[6] = tops[7] - fluid - layers[6]
    tops[5] = tops[6] - layers[5]
    # Photoreceptors follow every bump; the outer nuclear layer evens out the narrow ones.
    rest = bruch - layers[4:].sum(axis=0) - smooth(lift, 0.16)
    tops[4] = np.minimum(rest, tops[5] - 0.02)
    tops[3] = tops[4] - layers[3]
    tops[2] = tops[3] - layers[2]
    inner = rest - layers[2:4].sum(axis=0) + smooth(lift, 0.16) - smooth(lift, 0.35)
    tops[1] = np.minimum(inner - layers[1], tops[2] - 0.004)
    tops[0] = tops[1] - layers[0]
    return Profiles(x, tops, rpe, bruch, fluid, elevation, atrophy)


def render(scan: Scan, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """(size, size) grey values of a scan; `rng` draws choroidal vessels and noise."""
    curves = profiles(scan, size)
    anatomy, lesions = scan.anatomy, scan.lesions
    step = np.float32(DEPTH_MM / size)
    depth = ((np.arange(size, dtype=np.float32) + 0.5) * step)[:, None]
    signal = _tissue(scan, curves, depth, step)
    _add_choroid(signal, scan, curves, depth, rng)
    place = curves.tops[0], curves.tops[5]
    for x, share, width, height in lesions.cysts:
        _paint(signal, curves.x, *place, (x, share, width, height), _FLUID_GREY)
    for x, share, radius, grey in lesions.foci:
        _paint(signal, curves.x, *place, (x, share, 3.0 * radius, radius), grey)
    _shadow(signal, anatomy, curves, depth, step)
    return _expose(signal, scan, depth, rng)


def _tissue(scan: Scan, curves: Profiles, depth: Image, step: np.float32) -> Image:
    """Brightness of all layers down to Bruch's membrane; below it the choroid's brightness without decay."""
    anatomy, lesions = scan.anatomy, scan.lesions
    width = len(curves.x)
    loss = curves.atrophy
    edges = [*curves.tops[:7], curves.tops[7] - curves.fluid, curves.tops[7], curves.rpe, curves.bruch]
    greys: list[NDArray[np.float64] | float] = [_VITREOUS, *_LAYER_GREY[:5]]
    greys += [grey * (1.0 - 0.75 * loss) for grey in _LAYER_GREY[5:]]
    greys += [_FLUID_GREY, _RPE_GREY * (1.0 - 0.6 * loss), lesions.filling, _CHOROID_GREY]
    if anatomy.hyaloid:
        membrane = curves.tops[0] - anatomy.hyaloid * (0.4 + 0.08 * curves.x**2)
        edges = [membrane, membrane + 0.012, *edges]
        greys = [_VITREOUS, 0.3, *greys]
    signal = np.full((len(depth), width), greys[0], dtype=np.float32)
    ramp = np.empty_like(signal)
    for edge, above, below in zip(edges, greys[:-1], greys[1:], strict=True):
        np.subtract(depth / step + np.float32(0.5), (edge / step).astype(np.float32), out=ramp)
        np.clip(ramp, 0.0, 1.0, out=ramp)
        ramp *= np.asarray(np.subtract(below, above), dtype=np.float32)
        signal += ramp
    return signal


def _add_choroid(signal: Image, scan: Scan, curves: Profiles, depth: Image, rng: np.random.Generator) -> None:
    """Vessels and decay below Bruch's membrane; where the RPE is lost, more light arrives there."""
    anatomy = scan.anatomy
    count = int(rng.integers(14, 24))
    centres = np.column_stack(
        [
            rng.uniform(curves.x[0], curves.x[-1], count),
            rng.uniform(0.2, 0.9, count),
            rng.uniform(0.06, 0.32, count),
            anatomy.choroid * rng.uniform(0.07, 0.17, count),
        ]
    )
    bottom = curves.bruch + anatomy.choroid
    for row in centres:
        _paint(signal, curves.x, curves.bruch, bottom, tuple(row), 0.24)
    lost = smooth(curves.atrophy, 0.06)
    shade = np.clip(smooth(curves.elevation, 0.05) / 0.15, 0.0, 1.0)
    brighter = (0.9 * lost - 0.5 * shade).astype(np.float32)
    below = depth - curves.bruch.astype(np.float32)
    np.maximum(below, 0.0, out=below)
    reach = anatomy.choroid_decay * (1.0 + 0.6 * lost)
    fade = np.exp(below * (-1.0 / reach).astype(np.float32))
    fade *= 1.0 + brighter * np.minimum(below * np.float32(40.0), 1.0)
    signal *= fade


def _paint(
    signal: Image,
    x: NDArray[np.float64],
    top: NDArray[np.float64],
    bottom: NDArray[np.float64],
    body: tuple[float, ...],
    grey: float,
) -> None:
    """Blend an ellipse (x, place from top (0) to bottom (1), half width, half height) into `signal`."""
    rows, columns = signal.shape
    px, py = FIELD_MM / columns, DEPTH_MM / rows
    centre, share, width, height = body
    column = (centre - x[0]) / px
    at = round(float(column))
    if not 0 <= at < columns:
        return
    row = (top[at] + share * (bottom[at] - top[at])) / py - 0.5
    # A body below the pixel size is drawn as one pixel with its share of the contrast.
    a, b = max(width / px, 0.5), max(height / py, 0.5)
    cover = min(width / px / a, 1.0) * min(height / py / b, 1.0)
    left, right = max(int(column - a - 1), 0), min(int(column + a + 2), columns)
    up, down = max(int(row - b - 1), 0), min(int(row + b + 2), rows)
    if left >= right or up >= down:
        return
    dx = (np.arange(left, right, dtype=np.float32) - np.float32(column)) / np.float32(a)
    dy = (np.arange(up, down, dtype=np.float32) - np.float32(row)) / np.float32(b)
    inside = (1.0 - np.sqrt(dx[None, :] ** 2 + dy[:, None] ** 2)) * np.float32(min(a, b)) + np.float32(0.5)
    np.clip(inside, 0.0, cover, out=inside)
    window = signal[up:down, left:right]
    window += inside * (np.float32(grey) - window)


def _shadow(signal: Image, anatomy: Anatomy, curves: Profiles, depth: Image, step: np.float32) -> None:
    """Retinal vessels absorb what would come back from below them."""
    offset = (curves.x[None, :] - anatomy.vessels[:, 0:1]) / anatomy.vessels[:, 1:2]
    # A vessel narrower than a column darkens it only in part.
    share = np.minimum(anatomy.vessels[:, 1:2] * len(curves.x) / FIELD_MM, 1.0)
    loss = anatomy.shadow * (share * np.exp(-0.5 * np.minimum(offset**2, 60.0))).max(axis=0)
    touched = np.flatnonzero(loss > 0.01)
    below = np.clip((depth - curves.tops[1][touched].astype(np.float32)) / step, 0.0, 1.0)
    signal[:, touched] *= 1.0 - loss[touched].astype(np.float32) * below


def _expose(signal: Image, scan: Scan, depth: Image, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Speckle, noise floor, roll-off with depth and the scanner's display curve."""
    anatomy = scan.anatomy
    size = len(depth)
    # Smaller images average more speckle grains into one pixel.
    scale = np.float32(np.sqrt(size / 128.0)) if size < 128 else np.float32(1.0)
    grain = rng.standard_normal((size, size), dtype=np.float32)
    grain[:, 1:] += np.float32(0.6) * grain[:, :-1]
    grain *= np.float32(anatomy.speckle) * scale * (1.0 + np.float32(0.25) * depth)
    np.exp(grain, out=grain)
    signal *= grain
    signal *= np.exp(np.float32(-anatomy.roll_off) * depth)
    floor = rng.standard_normal((size, size), dtype=np.float32)
    floor *= np.float32(0.6) * scale
    np.abs(floor, out=floor)
    floor += np.float32(0.6) * (1.0 - scale) + np.float32(0.2)
    floor *= np.float32(anatomy.floor)
    signal += floor
    signal *= np.float32(anatomy.gain * scan.placement.gain)
    np.clip(signal, 0.0, 1.0, out=signal)
    np.power(signal, np.float32(anatomy.gamma), out=signal)
    signal *= np.float32(255.0)
    return np.rint(signal).astype(np.uint8)
