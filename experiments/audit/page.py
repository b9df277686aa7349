"""An audit as plain data, and as one HTML page that holds everything inside itself."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib import resources
from io import BytesIO
from math import isfinite
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from numpy.typing import NDArray
from PIL import Image

from experiments.audit.audit import AuditPlan, AuditResult
from experiments.config import RunFile
from fedsir import __version__
from fedsir.audit.verdict import REASONS
from fedsir.audit.worklist import Proposal
from fedsir.data.dataset import Dataset

SHOWN = 60
"""Rows of the worklist that the page shows with pictures; the CSV has all."""

THUMBNAIL = 96

DISCLAIMER = (
    "Proposed labels are training targets and a worklist for graders. They are not diagnoses, and nothing here "
    "changes a clinical record."
)
_ORDER = {"suspect": 0, "undetermined": 1, "inconspicuous": 2}


def summary_of(result: AuditResult, plan: AuditPlan, config: RunFile, dataset: Dataset, kind: str) -> dict[str, Any]:
    """Everything but the pictures, as JSON can hold it: numbers that are not finite are None."""
    correction = result.correction
    content = {
        "title": f"Audit of {dataset.name} ({kind} images)",
        "kind": kind,
        "version": __version__,
        "digest": dataset.digest[:16],
        "disclaimer": DISCLAIMER,
        "conclusion": conclusion(result),
        "class_names": list(result.class_names),
        "settings": plan.settings.model_dump(mode="json"),
        "seeds": list(plan.seeds),
        "images": len(dataset.train),
        "held_out": len(dataset.test),
        "backbone": config.model.backbone,
        "weights": config.model.weights,
        "image_size": config.data.image_size,
        "runs": result.spectral.runs,
        "stage_one_splits": result.spectral.splits,
        "notes": list(dataset.notes),
        "sites": [_site(result, k) for k in range(result.sites.num_sites)],
        "correction": None
        if correction is None
        else {
            "without": list(correction.without),
            "corrected": list(correction.corrected),
            "held_out": correction.held_out,
            "unreferenced": list(correction.unreferenced),
            "seeds": list(plan.training_seeds),
            "proposals": len(correction.proposals),
        },
    }
    plain: dict[str, Any] = _finite(content)
    return plain


def conclusion(result: AuditResult) -> str:
    """What the audit says about the consortium as a whole, in one or two sentences."""
    names = result.sites.names
    of = {v: [n for n, s in zip(names, result.verdicts, strict=True) if s.verdict == v] for v in _ORDER}
    if all(v.reason == "few_sites" for v in result.verdicts):
        return "Undetermined: too few sites with two classes to compare with one another. Nobody is judged."
    undetermined = f" Nothing can be said about {', '.join(of['undetermined'])}." if of["undetermined"] else ""
    if result.split:
        accused = ", ".join(of["suspect"])
        whose = "Its labels fit its" if len(of["suspect"]) == 1 else "Their labels fit their"
        return f"Suspect: {accused}. {whose} images worse than chance explains.{undetermined}"
    return (
        "No site stands apart from the others, so the consortium is not split into clean and noisy sites. Each row "
        f"says which errors would have been noticed.{undetermined}"
    )


def _site(result: AuditResult, k: int) -> dict[str, Any]:
    sites, evidence, spectral, verdict = result.sites, result.evidence, result.spectral, result.verdicts[k]
    against = evidence.disagreement
    proposals = result.correction.proposals if result.correction else ()
    own = np.flatnonzero(sites.sites == k)
    return {
        "name": sites.names[k],
        "images": len(own),
        "patients": int(sites.patient_counts()[k]),
        "counts": sites.counts()[k].tolist(),
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "why": REASONS[verdict.reason],
        "shifted": verdict.shifted,
        "pass": int(result.examination.passes[k]),
        "share": float(evidence.share[k]),
        "disagreement": float(against.observed[k]),
        "expected": float(against.centre[k]),
        "spread": float(against.spread[k]),
        "critical": float(against.critical[k]),
        "z": float(against.z[k]),
        "p": float(against.p[k]),
        "family": float(against.family[k]),
        "stability": float(evidence.stability[k]),
        "detection": float(evidence.detection[k]),
        "inconsistency_p": float(evidence.inconsistency.p[k]),
        "shift_family": float(evidence.shift.family[k]),
        "shift_z": float(evidence.shift.z[k]),
        "score": float(spectral.score[k]),
        "score_sd": float(spectral.score_sd[k]),
        "called_noisy": float(spectral.called_noisy[k]),
        "called_noisy_null": float(spectral.called_noisy_null[k]),
        "spectral_p": float(spectral.p[k]),
        "similarity": spectral.similarity[k].tolist(),
        "proposals": sum(sites.sites[p.image] == k for p in proposals),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if isinstance(value, np.generic):
        return _finite(value.item())
    return None if isinstance(value, float) and not isfinite(value) else value


def render_page(summary: Mapping[str, Any], proposals: Sequence[Proposal], dataset: Dataset) -> str:
    """The page; names from manifests are escaped, and nothing is fetched from anywhere."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(percent=_percent, number=_number, shade=_shade)
    folder = resources.files("experiments.audit") / "templates"
    template = environment.from_string((folder / "audit.html.j2").read_text("utf-8"))
    names, sites = dataset.train.names, dataset.train.sites or ()
    rows = [
        {
            "rank": rank,
            "image": names[p.image],
            "site": sites[p.image],
            "observed": dataset.class_names[p.observed],
            "proposed": dataset.class_names[p.proposed],
            "margin": p.margin,
            "stability": p.stability,
            "representative": p.representative,
            "residual": p.residual,
            "picture": thumbnail(dataset.train.images[p.image]),
        }
        for rank, p in enumerate(proposals[:SHOWN], start=1)
    ]
    ordered = sorted(summary["sites"], key=lambda s: (_ORDER[s["verdict"]], s["name"]))
    return template.render(**{**summary, "sites": ordered}, rows=rows, plot=_plot(ordered), shown=SHOWN)


def thumbnail(pixels: NDArray[np.uint8]) -> str:
    """A picture (H, W) uint8 as a data URI, at most `THUMBNAIL` pixels wide and high."""
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _plot(sites: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Places 0..100 of each site's disagreement, its range if it were like the others, and its limit."""
    known = [s for s in sites if s["disagreement"] is not None and s["critical"] is not None]
    if not known:
        return []
    lows = [min(s["expected"] - 2 * s["spread"], s["disagreement"]) for s in known]
    highs = [max(s["critical"], s["disagreement"]) for s in known]
    low, width = min(lows), max(max(highs) - min(lows), 1e-9)

    def place(value: float) -> float:
        return round(float(100.0 * (value - low) / width), 2)

    return [
        {
            "name": s["name"],
            "verdict": s["verdict"],
            "low": place(s["expected"] - 2 * s["spread"]),
            "high": place(s["expected"] + 2 * s["spread"]),
            "limit": place(s["critical"]),
            "value": place(s["disagreement"]),
        }
        for s in known
    ]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _shade(value: float | None) -> str:
    """Background of a similarity: none at 0.3 and below, full at 1."""
    return "transparent" if value is None else f"rgba(178, 72, 24, {max(0.0, min(1.0, (value - 0.3) / 0.7)):.2f})"
