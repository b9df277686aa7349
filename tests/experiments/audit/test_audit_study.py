"""`fedsir study audit`: what it plants, counts and resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.audit.study import ROWS, Row, phantom_consortium, pseudo_sites, summary
from fedsir.audit.consortium import PhantomSite
from fedsir.errors import BadInput

LAYOUT = (PhantomSite("North", patients=10), PhantomSite("South", patients=10, wrong=0.5))
NAN = float("nan")
ROW = Row(
    scenario="example",
    seed=0,
    site="North",
    images=100,
    wrong=0.0,
    verdict="inconspicuous",
    reason="no_evidence",
    shifted=False,
    family=0.8,
    p=0.3,
    z=0.4,
    stability=0.0,
    share=0.2,
    called_noisy=0.5,
    called_noisy_null=0.4,
    spectral_p=0.6,
    worklist=0,
    precision_25=NAN,
    precision_100=NAN,
    without=NAN,
    corrected=NAN,
)
SUSPECT = {"verdict": "suspect", "reason": "evidence"}


def test_planted_errors_are_those_that_the_study_counts() -> None:
    planted = phantom_consortium(LAYOUT, 0, 32)
    train = planted.dataset.train
    wrong = train.labels != planted.true
    assert {train.sites[i] for i in np.flatnonzero(wrong)} == {"South"}
    assert not np.intersect1d(train.patients, planted.dataset.test.patients).size


def test_pseudo_sites_divide_no_patient_and_spoil_one_site() -> None:
    whole = phantom_consortium((PhantomSite("all", patients=60),), 0, 32).dataset
    planted = pseudo_sites(whole, 3, sites=4)
    train = planted.dataset.train
    spoilt = [name for name, share in planted.wrong.items() if share]
    assert len(spoilt) == 1
    assert {train.sites[i] for i in np.flatnonzero(train.labels != planted.true)} == set(spoilt)
    for patient in np.unique(train.patients):
        assert len({train.sites[i] for i in np.flatnonzero(train.patients == patient)}) == 1


def test_a_summary_counts_sites_and_audits() -> None:
    rows = [
        ROW,
        replace(ROW, site="South", wrong=0.3, **SUSPECT),
        replace(ROW, seed=1, **SUSPECT),
        replace(ROW, seed=1, site="South", wrong=0.3, verdict="undetermined", reason="unstable"),
    ]
    lines = dict(summary(rows))
    assert lines["audits"] == "2"
    assert lines["noisy sites found"] == "1 of 2"
    assert lines["… of them undetermined"] == "1 of 2"
    assert lines["clean sites accused"] == "1 of 2"
    assert lines["audits with a clean site accused"] == "1 of 2"


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "studies" / "audit.csv"
    row = replace(ROW, shifted=True, precision_25=0.75, precision_100=0.5, without=0.8, corrected=0.81)
    ROWS.append(path, [row])
    ROWS.append(path, [replace(row, site="South")])
    assert ROWS.read(path) == [row, replace(row, site="South")]


def test_other_files_are_no_study(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="not the file of an audit study"):
        ROWS.read(path)
