"""The healthy eye: what a patient keeps from scan to scan, and where one scan cuts through it.

Lateral positions and radii are mm along the retina from the foveal centre, axial ones mm of depth; a B-scan
shows `FIELD_MM` × `DEPTH_MM`. The axial field is that of a tightly cropped scan, so that thin layers survive
at 64 px.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIELD_MM = 6.0
DEPTH_MM = 1.3

# NFL, GCL/IPL, INL, OPL, ONL, ellipsoid zone (with myoid), interdigitation zone, RPE.
LAYER_NAMES = ("nfl", "gcl_ipl", "inl", "opl", "onl", "ez", "iz", "rpe")
_TYPICAL_MM = np.array([0.034, 0.088, 0.042, 0.028, 0.080, 0.026, 0.018, 0.026])
_SPREAD = np.array([0.22, 0.13, 0.15, 0.15, 0.15, 0.08, 0.12, 0.08])


@dataclass(frozen=True)
class Anatomy:
    """What all scans of one patient share.

    layers: (8,) float64 parafoveal thicknesses in mm in the order of `LAYER_NAMES`.
    pit, pit_radius: 0..1 share of the inner layers missing at the foveal centre; mm.
    curvature: mm of depth per mm² (positive: edges higher).
    nasal: relative gain of the NFL per mm; its sign is the eye's side.
    choroid, choroid_decay: thickness and 1/e depth of the signal, both mm.
    vessels, shadow: (V, 2) float64 lateral position and half width in mm of retinal vessels; 0..1 light lost.
    hyaloid: mm between ILM and a detached hyaloid, 0 without one.
    gain, gamma, speckle, floor, roll_off: the scanner's brightness factor, display exponent, relative grain,
    noise level, and signal lost per mm of depth.
    """

    layers: NDArray[np.float64]
    pit: float
    pit_radius: float
    curvature: float
    nasal: float
    choroid: float
    choroid_decay: float
    vessels: NDArray[np.float64]
    shadow: float
    hyaloid: float
    gain: float
    gamma: float
    speckle: float
    floor: float
    roll_off: float


@dataclass(frozen=True)
class Placement:
    """How one scan lies.

    fovea_x, plane: mm from mid-field to the fovea and from the fovea to the scan's plane.
    tilt: mm of depth per mm. depth: mm from the top to Bruch's membrane at mid-field.
    gain: brightness factor of this exposure.
    waviness: (4,) float64 amplitudes in mm of slow sine deviations of Bruch's membrane.
    """

    fovea_x: float
    plane: float
    tilt: float
    depth: float
    gain: float
    waviness: NDArray[np.float64]


def draw_anatomy(rng: np.random.Generator) -> Anatomy:
    """One patient's eye and scanner."""
    vessels = int(rng.integers(2, 7))
    side = 1.0 if rng.random() < 0.5 else -1.0
    return Anatomy(
        layers=_TYPICAL_MM * np.exp(_SPREAD * rng.standard_normal(8)) * np.exp(0.06 * rng.standard_normal()),
        pit=float(rng.uniform(0.75, 1.0)),
        pit_radius=float(rng.uniform(0.45, 0.8)),
        curvature=float(rng.normal(0.008, 0.009)),
        nasal=side * float(rng.uniform(0.1, 0.3)),
        choroid=float(np.clip(rng.normal(0.28, 0.08), 0.12, 0.5)),
        choroid_decay=float(rng.uniform(0.13, 0.28)),
        vessels=np.column_stack(
            [rng.uniform(-4.0, 4.0, vessels), rng.uniform(0.02, 0.06, vessels)],
        ),
        shadow=float(rng.uniform(0.1, 0.5)),
        hyaloid=float(rng.uniform(0.05, 0.2)) if rng.random() < 0.2 else 0.0,
        gain=float(np.exp(0.16 * rng.standard_normal())),
        gamma=float(rng.uniform(0.9, 1.25)),
        speckle=float(rng.uniform(0.12, 0.28)),
        floor=float(rng.uniform(0.03, 0.11)),
        roll_off=float(rng.uniform(0.0, 0.35)),
    )


def draw_placement(rng: np.random.Generator) -> Placement:
    """One scan of a patient."""
    return Placement(
        fovea_x=float(np.clip(rng.normal(0.0, 0.5), -1.2, 1.2)),
        plane=float(np.clip(rng.normal(0.0, 0.25), -0.6, 0.6)),
        tilt=float(rng.normal(0.0, 0.028)),
        depth=float(rng.uniform(0.66, 0.86)),
        gain=float(np.exp(0.06 * rng.standard_normal())),
        waviness=rng.normal(0.0, 0.006, 4),
    )


def lateral_mm(columns: int, placement: Placement) -> NDArray[np.float64]:
    """(columns,) positions of the pixel centres relative to the foveal centre."""
    return ((np.arange(columns) + 0.5) / columns - 0.5) * FIELD_MM - placement.fovea_x


def bruch_mm(anatomy: Anatomy, placement: Placement, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """(W,) depth of Bruch's membrane."""
    field = x + placement.fovea_x
    waves = np.sin(np.outer(np.arange(1.0, 5.0), field * (np.pi / FIELD_MM)) + np.arange(4.0)[:, None])
    bruch: NDArray[np.float64] = placement.depth + placement.tilt * field - anatomy.curvature * field**2
    bruch += placement.waviness @ waves
    return bruch


def healthy_layers(anatomy: Anatomy, placement: Placement, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """(8, W) layer thicknesses in mm along the scan, before any lesion."""
    r2 = (x**2 + placement.plane**2) / anatomy.pit_radius**2
    hole = anatomy.pit * np.exp(-r2)
    # The inner layers pushed out of the pit form the parafoveal rim around it.
    rim = 0.45 * r2 * np.exp(1.0 - 0.8 * r2)
    thickness = np.repeat(anatomy.layers[:, None], len(x), axis=1)
    thickness[0] *= (1.0 - 0.95 * hole) * np.clip(1.0 + anatomy.nasal * x, 0.35, 2.0)
    thickness[1] *= (1.0 - 0.96 * hole) * (1.0 + 0.3 * rim)
    thickness[2] *= (1.0 - 0.85 * hole) * (1.0 + 0.15 * rim)
    thickness[3] *= 1.0 - 0.55 * hole
    thickness[4] *= 1.0 + 0.45 * hole
    thickness[:5] *= np.clip(1.0 - 0.016 * x**2, 0.6, 1.0)
    return thickness
