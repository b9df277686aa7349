"""How often is an audit right? Phantom consortia and a cut-up Kermany folder, whose errors the study put there itself.

The audit sees what it would see of a real consortium; only the study, which made the errors, counts them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.audit.audit import AuditPlan, AuditResult, audit
from experiments.config import RunFile
from experiments.session import Session
from experiments.studies.rows import RowFile
from fedsir.audit.consortium import AVERAGED, EXAMPLE, Consortium, PhantomSite, draw_consortium
from fedsir.config.data import KermanyData
from fedsir.config.federation import NoiseConfig
from fedsir.data.dataset import Dataset, ImageSet
from fedsir.data.phantom.cohorts import COHORTS
from fedsir.data.split import split_patients
from fedsir.errors import BadInput
from fedsir.federation.noise import corrupt_labels, transitions
from fedsir.seeding import Stream, generator

TOPS = (25, 100)
"""Numbers of first rows of the worklist whose precision is measured."""

SCENARIOS = {
    "example": EXAMPLE,
    "clean": tuple(PhantomSite(site.name) for site in EXAMPLE),
    "clean_shifted": tuple(
        PhantomSite(site.name, look=AVERAGED if site.name == "Glenrock" else None) for site in EXAMPLE
    ),
}

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Planted:
    """A data set with the labels that sites observe, and what the study knows about it.

    true: (N,) true labels of the training images. wrong: share of wrong labels by site name.
    """

    dataset: Dataset
    true: Ints
    wrong: dict[str, float]


@dataclass(frozen=True)
class Row:
    """One site of one audit. precision_25, precision_100: of the first rows of the audit's worklist, of all
    where it has fewer; NaN without rows."""

    scenario: str
    seed: int
    site: str
    images: int
    wrong: float
    verdict: str
    reason: str
    shifted: bool
    family: float
    p: float
    z: float
    stability: float
    share: float
    called_noisy: float
    called_noisy_null: float
    spectral_p: float
    worklist: int
    precision_25: float
    precision_100: float
    without: float
    corrected: float


ROWS = RowFile(Row, "an audit study")


def phantom_consortium(layout: Sequence[PhantomSite], seed: int, size: int) -> Planted:
    """A phantom consortium as a data set: a fifth of the patients is held out."""
    drawn = draw_consortium(tuple(layout), seed, size)
    is_test = split_patients(drawn.observed, drawn.patients, 0.2, generator(seed, Stream.SPLIT))
    dataset = Dataset(
        name="phantom-consortium",
        kind="phantom",
        class_names=COHORTS["kermany"].class_names,
        train=_part(drawn, ~is_test),
        test=_part(drawn, is_test),
        digest=f"consortium-{seed}-{size}",
    )
    return Planted(dataset, drawn.true[~is_test], {site.name: site.wrong for site in layout})


def pseudo_sites(dataset: Dataset, seed: int, sites: int = 6, wrong: float = 0.3) -> Planted:
    """A data set without sites, cut into `sites` by patient; one of them gets a share of `wrong` labels."""
    rng = generator(seed, Stream.AUDIT, 20)
    people = np.unique(np.concatenate([dataset.train.patients, dataset.test.patients]))
    owner = dict(zip(rng.permutation(people).tolist(), np.arange(len(people)) % sites, strict=True))
    spoilt = int(rng.integers(sites))
    names = [f"pseudo-site {k + 1}" for k in range(sites)]
    table = transitions(NoiseConfig(type="asymmetric", label_map="kermany"), dataset.class_names)

    def part(images: ImageSet) -> ImageSet:
        own = np.array([owner[p] for p in images.patients.tolist()])
        labels = images.labels.copy()
        labels[own == spoilt] = corrupt_labels(labels[own == spoilt], table, wrong, "floor", rng)
        return replace(images, labels=labels, sites=tuple(names[k] for k in own))

    planted = replace(dataset, train=part(dataset.train), test=part(dataset.test))
    return Planted(planted, dataset.train.labels, {n: wrong if k == spoilt else 0.0 for k, n in enumerate(names)})


def planter(session: Session, config: RunFile, scenario: str, root: Path | None) -> Callable[[int], Planted]:
    """What makes the consortium of a seed; `root` is the Kermany release's folder. Raises BadInput."""
    if scenario in SCENARIOS:
        return lambda seed: phantom_consortium(SCENARIOS[scenario], seed, config.data.image_size)
    if scenario != "kermany":
        raise BadInput(f"there is no scenario {scenario!r}.\nChoose among {', '.join(SCENARIOS)}, kermany.")
    if root is None:
        raise BadInput("the scenario kermany needs the release's folder.\nGive it with --root.")
    data = KermanyData(
        source="kermany",
        root=root,
        image_size=config.data.image_size,
        transform=config.data.transform,
        on_patient_overlap="drop_from_train",
    )
    whole = session.dataset(config.model_copy(update={"data": data}))
    return lambda seed: pseudo_sites(whole, seed)


def _part(drawn: Consortium, mask: NDArray[np.bool_]) -> ImageSet:
    chosen = np.flatnonzero(mask)
    sites = [drawn.site_names[k] for k in drawn.sites[chosen]]
    return ImageSet(
        images=drawn.images[chosen],
        labels=drawn.observed[chosen],
        patients=drawn.patients[chosen],
        names=tuple(f"{site}/{i}" for site, i in zip(sites, chosen.tolist(), strict=True)),
        sites=tuple(sites),
    )


def study(
    session: Session,
    config: RunFile,
    scenario: str,
    planted: Callable[[int], Planted],
    seeds: Sequence[int],
    plan: AuditPlan,
    out: Path,
    tell: Callable[[str], None],
) -> list[Row]:
    """Audit one consortium per seed; rows go to `out` as they come, and seeds found there are not audited again."""
    rows = ROWS.read(out)
    done = {(row.scenario, row.seed) for row in rows}
    ROWS.append(out, [])
    for seed in seeds:
        if (scenario, seed) in done:
            continue
        made = planted(seed)
        settings = plan.settings.model_copy(update={"seed": seed})
        result = audit(session, config, made.dataset, replace(plan, settings=settings), lambda _: None)
        found = study_rows(scenario, seed, made, result)
        ROWS.append(out, found)
        rows += found
        accused = [row.site for row in found if row.verdict == "suspect"]
        tell(f"{scenario}, seed {seed}: suspect {', '.join(accused) or 'nobody'}")
    return [row for row in rows if row.scenario == scenario and row.seed in seeds]


def study_rows(scenario: str, seed: int, made: Planted, result: AuditResult) -> list[Row]:
    """One row per site of an audit, beside what the study knows."""
    correction, evidence, spectral = result.correction, result.evidence, result.spectral
    proposals = correction.proposals if correction else ()
    right = [p.proposed == made.true[p.image] for p in proposals]
    nan = float("nan")
    return [
        Row(
            scenario=scenario,
            seed=seed,
            site=name,
            images=int(np.count_nonzero(result.sites.sites == k)),
            wrong=made.wrong[name],
            verdict=result.verdicts[k].verdict,
            reason=result.verdicts[k].reason,
            shifted=result.verdicts[k].shifted,
            family=float(evidence.disagreement.family[k]),
            p=float(evidence.disagreement.p[k]),
            z=float(evidence.disagreement.z[k]),
            stability=float(evidence.stability[k]),
            share=float(evidence.share[k]),
            called_noisy=float(spectral.called_noisy[k]),
            called_noisy_null=float(spectral.called_noisy_null[k]),
            spectral_p=float(spectral.p[k]),
            worklist=len(proposals),
            precision_25=float(np.mean(right[: TOPS[0]])) if right else nan,
            precision_100=float(np.mean(right[: TOPS[1]])) if right else nan,
            without=float(np.mean(correction.without)) if correction else nan,
            corrected=float(np.mean(correction.corrected)) if correction else nan,
        )
        for k, name in enumerate(result.sites.names)
    ]


def summary(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Figures of a study in words: audits, detection, false alarms, undetermined sites, precision."""
    audits = {row.seed for row in rows}
    noisy, clean = [r for r in rows if r.wrong > 0], [r for r in rows if r.wrong == 0]
    accused = [r for r in clean if r.verdict == "suspect"]
    lines = [("audits", str(len(audits)))]
    if noisy:
        lines.append(("noisy sites found", _of([r.verdict == "suspect" for r in noisy])))
        lines.append(("… of them undetermined", _of([r.verdict == "undetermined" for r in noisy])))
    lines.append(("clean sites accused", _of([r.verdict == "suspect" for r in clean])))
    lines.append(("audits with a clean site accused", f"{len({r.seed for r in accused})} of {len(audits)}"))
    lines.append(("clean sites undetermined", _of([r.verdict == "undetermined" for r in clean])))
    lines.append(("clean sites flagged as shifted", _of([r.shifted for r in clean])))
    first = {r.seed: r for r in rows}.values()
    if any(r.worklist for r in first):
        lines.append(("rows of the worklist, mean", f"{np.mean([r.worklist for r in first if r.worklist]):.0f}"))
        for top, name in zip(TOPS, ("precision_25", "precision_100"), strict=True):
            values = [getattr(r, name) for r in first if r.worklist]
            lines.append((f"precision of the first {top} rows, mean (least)", _percents(values)))
        gains = [r.corrected - r.without for r in first if r.worklist]
        lines.append(("accuracy gained by correction, points, mean", f"{100 * np.mean(gains):+.1f}"))
    for who, of in (("noisy", noisy), ("clean", clean)):
        shares = [r.called_noisy for r in of if np.isfinite(r.called_noisy)]
        if shares:
            lines.append(
                (f"{who} sites called noisy by stage I's split, of its runs", f"{100 * np.mean(shares):.0f} %")
            )
    null = [r.called_noisy_null for r in rows if np.isfinite(r.called_noisy_null)]
    if null:
        lines.append(("… in homogeneous splits", f"{100 * np.mean(null):.0f} %"))
    return lines


def _of(flags: Sequence[bool]) -> str:
    return f"{sum(flags)} of {len(flags)}"


def _percents(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.1f} % ({100 * min(values):.1f} %)"
