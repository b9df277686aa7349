"""`fedsir audit` and what belongs to it: options; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.options import SetOption

FolderOption = Annotated[
    Path | None,
    typer.Option(help="Folder for page and worklist; default: fedsir-runs/audits/ and the manifest's name."),
]


def audit(
    manifest: Annotated[
        Path, typer.Argument(help="CSV with path, label, patient_id and site of every image.", metavar="MANIFEST")
    ],
    out: FolderOption = None,
    config: Annotated[
        str | None, typer.Option(help="YAML file with network, training and method in place of the shipped one.")
    ] = None,
    phantom: Annotated[
        bool, typer.Option("--phantom", help="The images are phantoms: a small network that knows them.")
    ] = False,
    rate: Annotated[
        float, typer.Option(help="Share of all-clean consortia in which a site may be called suspect.", min=0, max=1)
    ] = 0.05,
    splits: Annotated[int, typer.Option(help="Homogeneous splits behind the calibration.", min=1)] = 499,
    seeds: Annotated[str, typer.Option(help="Seeds of stage I, e.g. 0-4.")] = "0-4",
    stage_one_splits: Annotated[
        int, typer.Option(help="Homogeneous splits on which stage I runs as well; 0 for none.", min=0)
    ] = 20,
    training_seeds: Annotated[
        str, typer.Option(help="Seeds of the training with and without proposed labels.")
    ] = "0-2",
    overrides: SetOption = None,
) -> None:
    """Which of your sites and labels deserve a second look? Needs no ground truth and changes no record.

    Compares every site's labels with the other sites', calibrated on consortia in which images were exchanged at
    random, and says suspect, inconspicuous or undetermined with the reason. For suspect sites it proposes labels, as
    training targets, in a worklist for graders.

    Examples:

        fedsir audit /data/consortium/manifest.csv --set model.weights=/data/squeezenet1_1.pth

        fedsir data consortium example && fedsir audit example/manifest.csv --phantom
    """
    from experiments.audit.commands import run_audit

    run_audit(manifest, out, config, phantom, rate, splits, seeds, stage_one_splits, training_seeds, overrides or [])


def audit_review(
    folder: Annotated[Path, typer.Argument(help="Folder that the audit wrote.")],
    worklist: Annotated[
        Path, typer.Argument(help="Its worklist.csv with the column grader_label filled in: a class, or unsure.")
    ],
) -> None:
    """Read back what graders say about a worklist: measured precision of the proposals, overall and per site.

    Example:

        fedsir audit-review fedsir-runs/audits/manifest graded.csv
    """
    from experiments.audit.commands import review

    review(folder, worklist)


def data_consortium(
    folder: Annotated[Path, typer.Argument(help="New or empty folder.")],
    seed: Annotated[int, typer.Option(help="Which consortium.", min=0)] = 0,
    size: Annotated[int, typer.Option(help="Side of the images in pixels.", min=16)] = 48,
) -> None:
    """Draw an example consortium of eight phantom sites, to try `fedsir audit` on.

    Two sites have 30 % wrong labels, one another scanner, one sends a single class. truth.csv tells; no command
    reads it.

    Example:

        fedsir data consortium example
    """
    from experiments.audit.commands import draw_example

    draw_example(folder, seed, size)


def study_audit(
    scenario: Annotated[
        str, typer.Argument(help="example, clean, clean_shifted (phantoms), or kermany with --root.")
    ] = "example",
    seeds: Annotated[str, typer.Option(help="One consortium per seed.")] = "0-9",
    root: Annotated[Path | None, typer.Option(help="Folder of the Kermany release, cut into six pseudo-sites.")] = None,
    splits: Annotated[int, typer.Option(help="Homogeneous splits behind the calibration.", min=1)] = 199,
    out: Annotated[
        Path | None, typer.Option(help="CSV of the verdicts; a study that was stopped goes on from it.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """How often is an audit right? Consortia whose errors the study plants itself and only the study knows.

    Examples:

        fedsir study audit example --seeds 0-9

        fedsir study audit kermany --root /data/OCT2017 --set data.image_size=64
    """
    from experiments.audit.commands import run_study

    run_study(scenario, seeds, root, splits, out, overrides or [])


def register(app: typer.Typer, data_app: typer.Typer, study_app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(audit)
    app.command("audit-review")(audit_review)
    data_app.command("consortium")(data_consortium)
    study_app.command("audit")(study_audit)
