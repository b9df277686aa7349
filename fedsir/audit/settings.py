"""What an audit takes for evidence."""

from __future__ import annotations

from pydantic import Field

from fedsir.config.base import Fraction, NonNegativeInt, PositiveInt, Section


class AuditSettings(Section):
    """Rates, resamples and the limits below which a site is called undetermined."""

    rate: Fraction = Field(
        default=0.05, description="stated rate: share of all-clean consortia in which any site may be called suspect"
    )
    splits: PositiveInt = Field(default=499, description="homogeneous splits behind the calibration")
    resamples: PositiveInt = Field(default=40, description="subsamples of patients behind the stability")
    subsample: Fraction = Field(default=0.8, description="share of each site's patients in a subsample")
    stable: Fraction = Field(default=0.8, description="share of subsamples that must agree with an accusation")
    components: PositiveInt = Field(default=64, description="principal components kept of the features")
    shrinkage: Fraction = Field(default=0.1, description="of within-class covariances towards the isotropic one")
    min_sites: PositiveInt = Field(default=4, description="sites with two classes; with fewer nobody is judged")
    min_images: PositiveInt = 30
    min_patients: PositiveInt = 8
    min_class_count: PositiveInt = Field(default=5, description="images a class needs at a site, and at the others")
    detectable: Fraction = Field(default=0.3, description="share of wrong labels that a site must not be able to hide")
    detection: Fraction = Field(
        default=0.5, description="chance of finding `detectable` below which a site without evidence is undetermined"
    )
    seed: NonNegativeInt = 0
