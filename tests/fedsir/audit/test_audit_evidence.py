"""Statistics and calibration on Gaussian sites: what they notice, and what they must not mistake for wrong labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsir.audit.calibration import calibrate
from fedsir.audit.evidence import (
    cross_site_log_p,
    disagreement,
    disagreement_share,
    principal_components,
    shift,
    without_site_offsets,
)
from fedsir.audit.examine import examine
from fedsir.audit.settings import AuditSettings
from fedsir.audit.sites import SiteLabels, homogeneous_split, patient_subsample

SITES, CLASSES, DIMENSIONS, SCANS = 6, 3, 8, 2
QUICK = AuditSettings(splits=59, resamples=10)


@dataclass(frozen=True)
class Made:
    features: NDArray[np.float64]
    labels: SiteLabels


def make(seed: int, people: int = 40, gap: float = 2.0) -> Made:
    """Six clean sites of one distribution: patients of two images each, three classes."""
    rng = np.random.default_rng(seed)
    means = np.eye(CLASSES, DIMENSIONS) * gap
    labels = np.repeat(rng.integers(CLASSES, size=SITES * people), SCANS)
    patients = np.repeat(np.arange(SITES * people), SCANS)
    own = rng.standard_normal((SITES * people, DIMENSIONS)) * 0.7
    features = means[labels] + own[patients] + rng.standard_normal((len(labels), DIMENSIONS)) * 0.7
    sites = np.repeat(np.arange(SITES), people * SCANS)
    return Made(features, SiteLabels(tuple("abcdef"), CLASSES, labels, sites, patients))


def spoilt(made: Made, site: int, share: float = 0.3) -> Made:
    """A share of one site's labels becomes the next class."""
    labels = made.labels.labels.copy()
    members = np.random.default_rng(site).permutation(np.flatnonzero(made.labels.sites == site))
    wrong = members[: round(share * len(members))]
    labels[wrong] = (labels[wrong] + 1) % CLASSES
    return replace(made, labels=replace(made.labels, labels=labels))


def moved(made: Made, site: int, far: float = 3.0) -> Made:
    """One site's images come from another scanner: all are moved alike, also along class differences."""
    features = made.features.copy()
    features[made.labels.sites == site] += far * np.array([0.6, -0.2, 0, 0.5, 0.4, 0, 0.3, -0.3])
    return replace(made, features=features)


# -- homogeneous splits and subsamples ---------------------------------------------------------------------------------


def test_a_homogeneous_split_keeps_every_sites_number_of_images_of_each_class() -> None:
    made = spoilt(make(0), 2)
    dealt = homogeneous_split(made.labels.labels, made.labels.sites, made.labels.patients, np.random.default_rng(1))
    assert np.array_equal(replace(made.labels, sites=dealt).counts(), made.labels.counts())
    assert np.mean(dealt == made.labels.sites) < 0.3


def test_a_homogeneous_split_divides_at_most_one_patient_per_class_and_site() -> None:
    labels = make(1).labels
    dealt = homogeneous_split(labels.labels, labels.sites, labels.patients, np.random.default_rng(2))
    divided = sum(len(np.unique(dealt[labels.patients == p])) > 1 for p in np.unique(labels.patients))
    assert divided <= CLASSES * (SITES - 1)
    assert np.all([len(np.unique(labels.sites[labels.patients == p])) == 1 for p in np.unique(labels.patients)])


def test_a_homogeneous_split_spreads_a_noisy_sites_errors() -> None:
    made = spoilt(make(2), 3)
    wrong = made.labels.labels != make(2).labels.labels
    dealt = homogeneous_split(made.labels.labels, made.labels.sites, made.labels.patients, np.random.default_rng(3))
    assert np.bincount(dealt[wrong], minlength=SITES).max() < 0.6 * wrong.sum()


def test_a_subsample_takes_whole_patients_of_every_site() -> None:
    labels = make(3).labels
    kept = patient_subsample(labels.sites, labels.patients, 0.5, np.random.default_rng(0))
    assert np.bincount(labels.sites[kept]).tolist() == [40] * SITES
    assert np.all(np.bincount(labels.patients[kept])[np.unique(labels.patients[kept])] == SCANS)


# -- statistics --------------------------------------------------------------------------------------------------------


def _disagreement(made: Made) -> NDArray[np.float64]:
    s = made.labels
    x = without_site_offsets(made.features, s.labels, s.sites, SITES, CLASSES)
    log_p = cross_site_log_p(x, s.labels, s.sites, SITES, CLASSES, 0.1, 5)
    return disagreement(log_p, s.labels, s.sites, SITES)


def test_wrong_labels_raise_the_disagreement_of_their_site_above_all_others() -> None:
    found = _disagreement(spoilt(make(4), 1))
    assert found.argmax() == 1
    assert found[1] > 2 * np.delete(found, 1).max()


def test_an_offset_of_all_of_a_sites_images_does_not_change_its_disagreement() -> None:
    made = make(5)
    plain, shifted = _disagreement(made), _disagreement(moved(made, 0, far=10.0))
    assert shifted == pytest.approx(plain, rel=1e-2)


def test_a_sites_own_labels_do_not_teach_the_classifier_that_judges_it() -> None:
    made = make(6)
    s = made.labels
    flipped = np.where(s.sites == 0, (s.labels + 1) % CLASSES, s.labels)
    before, after = (
        cross_site_log_p(made.features, labels, s.sites, SITES, CLASSES, 0.1, 5) for labels in (s.labels, flipped)
    )
    assert after[s.sites == 0] == pytest.approx(before[s.sites == 0], rel=1e-6, abs=1e-9)
    assert not np.allclose(before[s.sites == 1], after[s.sites == 1])


def test_classes_that_no_other_site_holds_are_not_judged() -> None:
    made = make(7)
    s = made.labels
    labels = np.where((s.sites != 0) & (s.labels == 2), 1, s.labels)
    log_p = cross_site_log_p(made.features, labels, s.sites, SITES, CLASSES, 0.1, 5)
    assert np.isnan(log_p[s.sites == 0][:, 2]).all()
    assert np.isfinite(log_p[s.sites == 0][:, :2]).all()
    share = disagreement_share(log_p, labels, s.sites, SITES)
    assert 0 <= share[0] < 0.3  # over its comparable images


@pytest.mark.parametrize("change", [lambda m: spoilt(m, 2, 0.5), lambda m: _one_class(m, 2)], ids=["errors", "mix"])
def test_neither_wrong_labels_nor_another_class_mix_is_a_shift(change: Callable[[Made], Made]) -> None:
    made = change(make(8))
    s = made.labels
    values = shift(made.features, s.labels, s.sites, SITES, CLASSES, 0.1)
    rng = np.random.default_rng(0)
    null = np.stack(
        [
            shift(made.features, s.labels, homogeneous_split(s.labels, s.sites, s.patients, rng), SITES, CLASSES, 0.1)
            for _ in range(59)
        ]
    )
    assert calibrate(values, null, 0.05).family[2] > 0.05
    apart = moved(made, 2)
    assert shift(apart.features, s.labels, s.sites, SITES, CLASSES, 0.1)[2] > null.max()


def _one_class(made: Made, site: int) -> Made:
    """Keep one class at a site."""
    s = made.labels
    kept = (s.sites != site) | (s.labels == 0)
    cut = replace(s, labels=s.labels[kept], sites=s.sites[kept], patients=s.patients[kept])
    return Made(made.features[kept], cut)


def test_principal_components_drop_what_has_no_spread_and_keep_distances() -> None:
    features = np.random.default_rng(0).standard_normal((50, 4))
    x = principal_components(np.column_stack([features, np.full(50, 7.0)]), 64)
    assert x.shape == (50, 4)
    scaled = (features - features.mean(axis=0)) / features.std(axis=0)
    assert np.linalg.norm(x[0] - x[1]) == pytest.approx(np.linalg.norm(scaled[0] - scaled[1]))


# -- calibration -------------------------------------------------------------------------------------------------------


def test_figures_count_the_observed_value_among_the_splits() -> None:
    null = np.array([[float(r), 0.0] for r in range(19)])
    found = calibrate(np.array([18.5, 0.0]), null, rate=0.05)
    assert found.p.tolist() == [1 / 20, 1.0]  # ties count against an accusation
    assert found.family[0] == 1 / 20


def test_critical_is_the_least_value_that_may_be_accused() -> None:
    rng = np.random.default_rng(0)
    null = rng.standard_normal((199, 5)) * [1, 2, 3, 4, 5] + 7
    found = calibrate(null.mean(axis=0), null, rate=0.05)
    above = calibrate(found.critical + 1e-9, null, rate=0.05)
    below = calibrate(found.critical - 1e-6, null, rate=0.05)
    assert np.all(above.family <= 0.05)
    assert np.all(below.family > 0.05)


def test_too_few_splits_can_accuse_nobody() -> None:
    found = calibrate(np.array([1e6]), np.random.default_rng(0).standard_normal((9, 1)), rate=0.05)
    assert found.family[0] > 0.05
    assert found.critical[0] == np.inf


def test_sites_without_a_statistic_have_no_figures_and_do_not_disturb_the_others() -> None:
    null = np.random.default_rng(1).standard_normal((99, 3))
    null[:, 1] = np.nan
    found = calibrate(np.array([0.0, np.nan, 9.0]), null, rate=0.05)
    assert np.isnan(found.family[1])
    assert np.isnan(found.critical[1])
    assert found.family[2] == 0.01


# -- everything together -----------------------------------------------------------------------------------------------


def test_a_noisy_site_is_found_and_no_other_accused() -> None:
    made = spoilt(make(10), 4)
    found = examine(made.features, made.labels, QUICK)
    assert [v.verdict for v in found.verdicts] == ["inconspicuous"] * 4 + ["suspect", "inconspicuous"]
    assert found.passes.tolist() == [2, 2, 2, 2, 1, 2]


def test_a_clean_site_with_another_scanner_is_called_shifted_and_not_noisy() -> None:
    made = moved(make(11), 3)
    verdicts = examine(made.features, made.labels, QUICK).verdicts
    assert [v.shifted for v in verdicts] == [k == 3 for k in range(SITES)]
    assert verdicts[3].verdict == "inconspicuous"


def test_a_noisy_site_with_another_scanner_is_both() -> None:
    made = moved(spoilt(make(12), 3, 0.4), 3)
    verdict = examine(made.features, made.labels, QUICK).verdicts[3]
    assert (verdict.verdict, verdict.shifted) == ("suspect", True)


def test_setting_one_noisy_site_aside_uncovers_another_behind_it() -> None:
    made = spoilt(spoilt(make(13), 0, 0.6), 5, 0.15)
    found = examine(made.features, made.labels, QUICK)
    assert found.verdicts[0].verdict == "suspect"
    assert found.passes[0] < found.passes[5]
    assert found.evidence.disagreement.family[5] <= 0.05


def test_an_examination_is_the_same_every_time() -> None:
    made = spoilt(make(14), 1)
    quick = QUICK.model_copy(update={"splits": 19, "rate": 0.1})
    first, second = (examine(made.features, made.labels, quick) for _ in range(2))
    assert first.verdicts == second.verdicts
    assert np.array_equal(first.evidence.disagreement.family, second.evidence.disagreement.family)


@pytest.mark.slow
@pytest.mark.parametrize("scanner", [None, 3], ids=["alike", "one shifted"])
def test_all_clean_consortia_are_accused_no_more_often_than_stated(scanner: int | None) -> None:
    audits, rate = 60, 0.2
    settings = AuditSettings(splits=29, resamples=10, rate=rate)
    accused = 0
    for seed in range(audits):
        made = make(1000 + seed) if scanner is None else moved(make(1000 + seed), scanner)
        accused += any(v.verdict == "suspect" for v in examine(made.features, made.labels, settings).verdicts)
    # Four SDs above the stated rate.
    assert accused <= audits * rate + 4 * np.sqrt(audits * rate * (1 - rate))
