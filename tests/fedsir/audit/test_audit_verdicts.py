"""Rules of the verdict, the worklist's ranking, what graders found, and the spectral summary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsir.audit.calibration import Calibrated
from fedsir.audit.review import measured_precision, wilson
from fedsir.audit.settings import AuditSettings
from fedsir.audit.sites import SiteLabels
from fedsir.audit.spectral import summarize
from fedsir.audit.verdict import REASONS, SiteEvidence, judge
from fedsir.audit.worklist import LabelScores, rank_proposals
from fedsir.spectral.identification import Identification

SITES = 5


def consortium(images: int = 40, num_sites: int = SITES) -> SiteLabels:
    """Sites of two classes, every image of another patient."""
    n = images * num_sites
    sites = np.repeat(np.arange(num_sites), images)
    return SiteLabels(tuple("abcdefgh"[:num_sites]), 2, np.arange(n) % 2, sites, np.arange(n))


def figures(num_sites: int = SITES, **first: float) -> Calibrated:
    """Nothing odd anywhere but what is given of the first site."""
    values = {
        name: np.full(num_sites, default)
        for name, default in {
            "observed": 0.0, "centre": 0.0, "spread": 1.0, "z": 0.0, "p": 0.5, "family": 0.9, "critical": 3.0
        }.items()
    }  # fmt: skip
    for name, value in first.items():
        values[name][0] = value
    return Calibrated(**values)


def evidence(num_sites: int = SITES, **changes: Any) -> SiteEvidence:
    """The first site accused by stable evidence; nothing else odd."""
    base = SiteEvidence(
        disagreement=figures(num_sites, family=0.01, p=0.01),
        inconsistency=figures(num_sites),
        shift=figures(num_sites),
        stability=np.ones(num_sites),
        detection=np.ones(num_sites),
        share=np.zeros(num_sites),
    )
    return replace(base, **changes)


SHIFTED = figures(family=0.01)
QUIET = figures()
CASES = {
    "accused": (evidence(), "suspect", "evidence"),
    "accused, not stable": (evidence(stability=np.full(SITES, 0.7)), "undetermined", "unstable"),
    "accused and shifted": (evidence(shift=SHIFTED), "undetermined", "shift_may_explain"),
    "also against its own": (evidence(shift=SHIFTED, inconsistency=figures(p=0.02)), "suspect", "evidence"),
    "one class of its own": (
        evidence(shift=SHIFTED, inconsistency=figures(p=float("nan"))), "undetermined", "shift_may_explain"
    ),
    "not accused": (evidence(disagreement=QUIET), "inconspicuous", "no_evidence"),
    "shifted only": (evidence(disagreement=QUIET, shift=SHIFTED), "inconspicuous", "no_evidence"),
    "nothing could be seen": (
        evidence(disagreement=QUIET, detection=np.full(SITES, 0.4)), "undetermined", "insensitive"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_verdict_on_a_site_follows_from_its_evidence(case: str) -> None:
    found, verdict, reason = CASES[case]
    site = judge(consortium(), found, AuditSettings())[0]
    assert (site.verdict, site.reason) == (verdict, reason)
    assert site.shifted == (found.shift is SHIFTED)


def test_every_reason_has_words() -> None:
    assert {reason for _, _, reason in CASES.values()} <= set(REASONS)


def test_with_few_sites_nobody_is_judged() -> None:
    verdicts = judge(consortium(num_sites=3), evidence(3), AuditSettings())
    assert {(v.verdict, v.reason) for v in verdicts} == {("undetermined", "few_sites")}


def test_single_class_sites_do_not_count_as_sites_to_compare_with() -> None:
    sites = consortium()
    labels = np.where(sites.sites < 2, 0, sites.labels)
    verdicts = judge(replace(sites, labels=labels), evidence(), AuditSettings())
    assert {v.reason for v in verdicts} == {"few_sites"}


def test_a_single_class_site_is_undetermined_however_odd_it_looks() -> None:
    sites = consortium()
    labels = np.where(sites.sites == 0, 0, sites.labels)
    verdict = judge(replace(sites, labels=labels), evidence(), AuditSettings())[0]
    assert (verdict.verdict, verdict.reason) == ("undetermined", "single_class")


def test_a_site_that_nothing_could_be_weighed_against_is_undetermined() -> None:
    """It shared its classes with nobody but a site that was set aside."""
    quiet = evidence(disagreement=figures(family=np.nan, p=np.nan), detection=np.full(SITES, np.nan))
    verdict = judge(consortium(), quiet, AuditSettings())[0]
    assert (verdict.verdict, verdict.reason) == ("undetermined", "single_class")


def test_few_patients_are_few_however_many_images_they_have() -> None:
    sites = consortium()
    patients = np.where(sites.sites == 0, sites.patients % 7, sites.patients)
    verdict = judge(replace(sites, patients=patients), evidence(), AuditSettings())[0]
    assert (verdict.verdict, verdict.reason) == ("undetermined", "few_images")


# -- worklist ----------------------------------------------------------------------------------------------------------

NAN = float("nan")


def scores(representative: list[list[float]], residual: list[list[float]], *checkpoints: list[int]) -> LabelScores:
    given = np.array(checkpoints, np.int64).reshape(len(checkpoints), len(representative))
    return LabelScores(np.array(representative), np.array(residual), given)


def test_labels_are_proposed_where_both_criteria_agree_the_clearest_first() -> None:
    found = scores(
        [[0.9, 0.1], [0.6, 0.5], [0.2, 0.8], [0.8, 0.3]],
        [[0.1, 0.5], [0.2, 0.25], [0.3, 0.1], [0.6, 0.2]],
        [0, 0, 1, 1],
        [0, 1, 1, 1],
    )
    proposals = rank_proposals(np.array([1, 1, 1, 1]), [found])
    assert [(p.image, p.observed, p.proposed) for p in proposals] == [(0, 1, 0), (1, 1, 0)]
    assert proposals[0].margin > proposals[1].margin > 0
    assert [p.stability for p in proposals] == [1.0, 0.5]
    assert proposals[0].representative == (0.1, 0.9)
    assert proposals[0].residual == (0.5, 0.1)


def test_scores_and_checkpoints_are_pooled_over_seeds() -> None:
    one = scores([[0.9, 0.2]], [[0.1, 0.4]], [0])
    other = scores([[0.3, 0.4]], [[0.3, 0.2]], [1])
    (proposal,) = rank_proposals(np.array([1]), [one, other])
    assert proposal.representative == pytest.approx((0.3, 0.6))
    assert proposal.stability == 0.5


def test_an_image_without_direction_costs_the_others_nothing() -> None:
    rng = np.random.default_rng(0)
    representative, residual = rng.random((6, 3)), rng.random((6, 3))
    observed = residual.argmax(axis=1)
    residual[np.arange(6), representative.argmax(axis=1)] = -1.0
    whole = LabelScores(representative, residual, np.tile(representative.argmax(axis=1), (2, 1)))
    lost = replace(whole, representative=representative.copy(), residual=residual.copy())
    lost.representative[0], lost.residual[0] = np.nan, np.nan
    kept = {p.image for p in rank_proposals(observed, [whole])} - {0}
    assert len(kept) >= 2
    assert {p.image for p in rank_proposals(observed, [lost])} == kept


def test_images_labelled_with_a_class_without_reference_keep_their_label() -> None:
    found = scores([[0.9, 0.2, NAN]] * 2, [[0.1, 0.4, NAN]] * 2, [0, 0])
    assert [p.image for p in rank_proposals(np.array([2, 1]), [found])] == [1]
    lonely = scores([[0.9, NAN, NAN]], [[0.1, NAN, NAN]], [0])
    assert rank_proposals(np.array([0]), [lonely]) == []


# -- graders -----------------------------------------------------------------------------------------------------------


def test_precision_is_of_rows_that_graders_decided() -> None:
    rows = [("A", "B", "B"), ("A", "B", "A"), ("A", "B", "C"), ("A", "B", "B"), ("A", "B", None)]
    found = measured_precision(rows)
    assert (found.reviewed, found.confirmed, found.kept, found.other, found.unsure) == (4, 2, 1, 1, 1)
    assert found.share == 0.5


def test_wilson_interval() -> None:
    # Newcombe 1998, table I: 81 of 263.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert all(np.isnan(v) for v in wilson(0, 0))
    assert wilson(0, 10)[0] == 0.0


# -- stage I -----------------------------------------------------------------------------------------------------------


def verdict(scores: list[float], clean: list[bool]) -> Identification:
    base = Identification.without_spectra(2, np.where(clean, 1.0, 0.0), np.array(clean), "mixture")
    p_clean = np.where(np.isfinite(scores), base.p_clean, np.nan)
    return replace(base, descriptors=np.column_stack([scores, scores, scores]), p_clean=p_clean)


def test_stage_one_is_summed_up_over_runs_beside_homogeneous_splits() -> None:
    runs = [verdict([0.5, 0.9, NAN], [True, False, False]), verdict([0.7, 0.9, NAN], [False, False, False])]
    splits = [verdict([0.6, 0.7, NAN], [True, False, False]), verdict([0.5, 0.6, NAN], [False, True, False])]
    found = summarize(runs, splits)
    assert found.score[:2] == pytest.approx([0.6, 0.9])
    assert found.score_sd[:2] == pytest.approx([0.1, 0.0])
    assert found.called_noisy[:2].tolist() == [0.5, 1.0]
    assert found.called_noisy_null[:2].tolist() == [0.5, 0.5]
    assert found.p[:2] == pytest.approx([2 / 3, 1 / 3])
    for values in (found.score, found.called_noisy, found.called_noisy_null, found.p):
        assert np.isnan(values[2])
