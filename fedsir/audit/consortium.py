"""Phantom consortia: sites with scanners, habits and errors of their own, whose truth is known because it was drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedsir.config.federation import NoiseConfig
from fedsir.data.phantom import draw_patient, draw_scan
from fedsir.data.phantom.cohorts import COHORTS
from fedsir.data.phantom.rendering import Scan
from fedsir.federation.noise import corrupt_labels, transitions
from fedsir.seeding import Stream, generator

CLASS_NAMES = COHORTS["kermany"].class_names


@dataclass(frozen=True)
class ScannerLook:
    """How a scanner's pictures differ from those of the phantom's own.

    gamma, speckle, floor, gain: factors on display exponent, grain, noise level and brightness. width: share of the
    lateral field that is scanned.
    """

    gamma: float = 1.0
    speckle: float = 1.0
    floor: float = 1.0
    gain: float = 1.0
    width: float = 1.0


AVERAGED = ScannerLook(gamma=1.45, speckle=0.45, floor=0.4, gain=1.1)
"""A device that averages many scans and shows them with more contrast."""

NARROW = ScannerLook(gamma=1.2, speckle=0.7, floor=0.6, width=0.75)
"""A device that scans three quarters of the width."""


@dataclass(frozen=True)
class PhantomSite:
    """One hospital: `patients` patients, `wrong` share of wrong labels in each class, `only` class it sends."""

    name: str
    patients: int = 50
    wrong: float = 0.0
    only: str | None = None
    look: ScannerLook | None = None


EXAMPLE = (
    PhantomSite("Ashford"),
    PhantomSite("Birchwood", wrong=0.3),
    PhantomSite("Crossley"),
    PhantomSite("Dunmore"),
    PhantomSite("Eastbrook", wrong=0.3),
    PhantomSite("Fernhill"),
    PhantomSite("Glenrock", look=AVERAGED),
    PhantomSite("Hartwell", only="NORMAL"),
)
"""Eight sites: two with 30 % wrong labels, a clean one with another scanner, a clean one with one class."""


@dataclass(frozen=True)
class Consortium:
    """images: (N, S, S) uint8. true, observed: (N,) int64 classes. patients, sites: (N,) int64."""

    site_names: tuple[str, ...]
    images: NDArray[np.uint8]
    true: NDArray[np.int64]
    observed: NDArray[np.int64]
    patients: NDArray[np.int64]
    sites: NDArray[np.int64]


def draw_consortium(
    layout: tuple[PhantomSite, ...],
    seed: int,
    size: int = 48,
    scans: int = 4,
    label_map: Mapping[str, str] | str = "kermany",
) -> Consortium:
    """Images of `scans` B-scans per patient and the labels that each site gives them.

    Wrong labels follow `label_map` (class: class it is mistaken for). Every site has patients of its own; those of
    other sites do not change with one site's errors or scanner.
    """
    cohort = COHORTS["kermany"]
    noise = NoiseConfig.model_validate({"type": "asymmetric", "label_map": label_map})
    table = transitions(noise, cohort.class_names)
    images, true, observed, patients, sites = [], [], [], [], []
    number = 0
    for k, site in enumerate(layout):
        labels: list[int] = []
        while len(labels) < site.patients * scans:
            label, taken = draw_patient(cohort, seed, 0, number, scans)
            number += 1
            if site.only is not None and cohort.class_names[label] != site.only:
                continue
            for s, scan in enumerate(taken):
                images.append(_picture(scan, site.look or ScannerLook(), seed, number - 1, s, size))
            labels += [label] * scans
            patients += [number - 1] * scans
        own = np.array(labels, dtype=np.int64)
        rng = generator(seed, Stream.NOISE, k)
        true.append(own)
        observed.append(corrupt_labels(own, table, site.wrong, "floor", rng))
        sites += [k] * len(own)
    return Consortium(
        site_names=tuple(site.name for site in layout),
        images=np.stack(images),
        true=np.concatenate(true),
        observed=np.concatenate(observed),
        patients=np.array(patients, dtype=np.int64),
        sites=np.array(sites, dtype=np.int64),
    )


def _picture(scan: Scan, look: ScannerLook, seed: int, patient: int, number: int, size: int) -> NDArray[np.uint8]:
    eye = scan.anatomy
    seen = replace(
        eye,
        gamma=eye.gamma * look.gamma,
        speckle=eye.speckle * look.speckle,
        floor=eye.floor * look.floor,
        gain=eye.gain * look.gain,
    )
    pixels = draw_scan(replace(scan, anatomy=seen), COHORTS["kermany"], seed, 0, patient, number, size)
    if look.width == 1.0:
        return pixels
    margin = size * (1.0 - look.width) / 2.0
    window = (margin, 0.0, size - margin, float(size))
    field = Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR, box=window)
    return np.asarray(field, dtype=np.uint8)
