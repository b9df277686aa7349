"""What was drawn, as continuous numbers: targets of the pretext task, never a class."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedsir.data.phantom.anatomy import FIELD_MM, LAYER_NAMES
from fedsir.data.phantom.rendering import Scan, profiles

GEOMETRY_NAMES = (
    *(f"{name}_mm" for name in LAYER_NAMES[:5]),
    "retina_min_mm",
    "retina_max_mm",
    "retina_sd_mm",
    "bruch_mm",
    "tilt",
    "curvature",
    "fluid_area",
    "fluid_height",
    "elevation_area",
    "elevation_height",
    "elevation_slope",
    "cyst_area",
    "cyst_count",
    "focus_count",
    "atrophy_width",
    "choroid_signal",
    "brightness",
    "speckle",
    "noise_floor",
)
_COLUMNS = 96


def geometry(scan: Scan) -> NDArray[np.float32]:
    """(24,) float32 in the order of `GEOMETRY_NAMES`; the same for a scan and its mirror image.

    Lengths are mm. Areas (mm²), heights and counts of lesions, which span orders of magnitude and are often
    0, are compressed by log(1 + value / unit), so that hard-to-see lesions count as well.
    """
    curves = profiles(scan, _COLUMNS)
    anatomy, placement, lesions = scan.anatomy, scan.placement, scan.lesions
    layers = np.diff(curves.tops[:6], axis=0).mean(axis=1)
    retina = curves.rpe - curves.tops[0]
    step = FIELD_MM / _COLUMNS
    cyst_area = float(np.pi * (lesions.cysts[:, 2] * lesions.cysts[:, 3]).sum())
    values = [
        *layers,
        retina.min(),
        retina.max(),
        retina.std(),
        curves.bruch.mean(),
        abs(placement.tilt),
        anatomy.curvature,
        _compressed(curves.fluid.sum() * step, 0.01),
        _compressed(curves.fluid.max(), 0.02),
        _compressed(curves.elevation.sum() * step, 0.01),
        _compressed(curves.elevation.max(), 0.02),
        _compressed(np.abs(np.diff(curves.elevation)).sum(), 0.04),
        _compressed(cyst_area, 0.01),
        _compressed(len(lesions.cysts), 2.0),
        _compressed(len(lesions.foci), 2.0),
        _compressed((curves.atrophy * step).sum(), 0.2),
        anatomy.choroid_decay,
        np.log(anatomy.gain * placement.gain),
        anatomy.speckle,
        anatomy.floor,
    ]
    return np.asarray(values, dtype=np.float32)


def _compressed(value: float, unit: float) -> float:
    return float(np.log1p(value / unit))
