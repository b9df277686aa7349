"""What the commands of `fedsir audit` do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.audit.example import MANIFEST, write_consortium
from experiments.audit.worklist_file import UNSURE, graded, read_worklist, worklist_rows, write_worklist
from experiments.commands import SAME, open_session
from experiments.compare import parse_seeds
from experiments.config import RunFile, load_run_file
from experiments.console import new_console, percent, say
from fedsir.audit.review import Precision, measured_precision
from fedsir.errors import BadInput
from fedsir.methods.spectral_settings import SpectralConfig

KERMANY = "kermany"
PAGE, WORKLIST, SUMMARY, REVIEW = "audit.html", "worklist.csv", "audit.json", "review.json"


def run_audit(
    manifest: Path,
    out: Path | None,
    source: str | None,
    phantom: bool,
    rate: float,
    splits: int,
    seeds: str,
    stage_one_splits: int,
    training_seeds: str,
    overrides: Sequence[str],
) -> None:
    """Audit the images of a manifest and write page, worklist and summary. Raises BadInput."""
    config = audit_config(source, phantom, [*overrides, f"data.manifest={json.dumps(str(manifest))}"])
    if rate * (splits + 1) < 1:
        raise BadInput(
            f"with {splits} splits no figure can be below {1 / (splits + 1):.3f}, so nobody could be called suspect at "
            f"--rate {rate:g}.\nSet --splits to {int(1 / rate) if rate else 'more'} or more."
        )
    folder = out or config.work_dir / "audits" / manifest.stem
    _writable(folder)
    if (folder / WORKLIST).exists() and any(entry.grader for entry in read_worklist(folder / WORKLIST)):
        raise BadInput(
            f"{folder / WORKLIST} has labels of graders, which another audit would overwrite.\n"
            "Name another folder with --out."
        )
    numbers, training = tuple(parse_seeds(seeds)), tuple(parse_seeds(training_seeds))
    console = new_console()
    with open_session(console, config.execution) as session:
        from experiments.audit.audit import AuditPlan, audit
        from experiments.audit.page import render_page, summary_of
        from fedsir.audit.settings import AuditSettings

        dataset = session.dataset(config)
        plan = AuditPlan(AuditSettings(rate=rate, splits=splits), numbers, stage_one_splits, training)
        result = audit(session, config, dataset, plan, partial(say, console, style="dim"))
    sites = dataset.train.sites or ()
    proposals = result.correction.proposals if result.correction else ()
    write_worklist(folder / WORKLIST, worklist_rows(proposals, dataset.train.names, sites, dataset.class_names))
    kind = "phantom" if phantom else dataset.kind
    summary = summary_of(result, plan, config, dataset, kind)
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1, allow_nan=False), encoding="utf-8")
    (folder / PAGE).write_text(render_page(summary, proposals, dataset), encoding="utf-8")
    (folder / REVIEW).unlink(missing_ok=True)
    console.print(_site_table(summary))
    for line in (
        "differ: images that the other sites would label otherwise; chance: of any site looking so in a clean "
        "consortium; stable: of subsamples; labels: proposed",
        *_reasons(summary),
    ):
        say(console, line, "dim")
    say(console, summary["conclusion"])
    say(console, summary["disclaimer"])
    say(console, f"page {folder / PAGE}")
    say(console, f"worklist of {len(proposals)} labels {folder / WORKLIST}")


def audit_config(source: str | None, phantom: bool, overrides: Sequence[str]) -> RunFile:
    """The run file behind an audit: `source`, or the shipped one for real or phantom images.

    Raises BadInput, also for methods that do not relabel by spectra.
    """
    if source is not None:
        config = load_run_file(source, overrides)
    else:
        shipped = resources.files("experiments.audit") / ("phantom.yaml" if phantom else "audit.yaml")
        with resources.as_file(shipped) as path:
            config = load_run_file(str(path), overrides)
    if not isinstance(config.method, SpectralConfig):
        raise BadInput(f"an audit needs a spectral method, not {config.method.name}.\nSet method.name=oct_fedsir.")
    return config


def _writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PAGE).touch()
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror or error}).\nName another with --out.") from error


def _site_table(summary: Mapping[str, Any]) -> Table:
    table = Table(title=summary["title"])
    table.add_column("site", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for column in ("differ\n%", "chance", "stable\n%", "shift", "labels"):
        table.add_column(column, justify="right", no_wrap=True)
    for site in summary["sites"]:
        table.add_row(
            site["name"],
            site["verdict"],
            percent(site["share"]),
            "–" if site["family"] is None else f"{site['family']:.3f}",
            percent(site["stability"]),
            "yes" if site["shifted"] else "no",
            str(site["proposals"]),
        )
    return table


def _reasons(summary: Mapping[str, Any]) -> list[str]:
    """Why sites are undetermined, one line each."""
    undetermined = [site for site in summary["sites"] if site["verdict"] == "undetermined"]
    return [f"{site['name']}: undetermined, {site['why']}" for site in undetermined]


def review(folder: Path, worklist: Path) -> None:
    """Measured precision of a graded worklist. Raises BadInput for files that do not fit together."""
    try:
        summary = json.loads((folder / SUMMARY).read_text("utf-8"))
        class_names = [str(name) for name in summary["class_names"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{folder} is not the folder of an audit ({error}).\nGive the folder with audit.json."
        ) from error
    found = graded(read_worklist(folder / WORKLIST), read_worklist(worklist), class_names, worklist)
    console = new_console()
    parts = {"all sites": found, **{s: [e for e in found if e.site == s] for s in sorted({e.site for e in found})}}
    precisions = {
        name: measured_precision([(e.observed, e.proposed, None if e.grader == UNSURE else e.grader) for e in part])
        for name, part in parts.items()
    }
    console.print(_precision_table(precisions))
    content = {name: {k: _plain(v) for k, v in vars(p).items()} for name, p in precisions.items()}
    (folder / REVIEW).write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    say(console, "Precision of the reviewed rows alone; graders saw the proposals, which may have swayed them.")
    say(console, f"figures in {folder / REVIEW}")


def _plain(value: float) -> float | None:
    return None if value != value else value


def _precision_table(precisions: dict[str, Precision]) -> Table:
    table = Table(title="proposed labels that graders confirmed")
    table.add_column("site")
    for column in ("reviewed", "confirmed", "observed\nkept", "third\nlabel", "unsure", "precision\n%", "95 %"):
        table.add_column(column, justify="right")
    for name, p in precisions.items():
        counts = (p.reviewed, p.confirmed, p.kept, p.other, p.unsure)
        table.add_row(name, *map(str, counts), percent(p.share), f"{percent(p.low)}–{percent(p.high)}")
    return table


def draw_example(folder: Path, seed: int, size: int) -> None:
    """Write the example consortium."""
    images, wrong = write_consortium(folder, seed, size)
    console = new_console()
    say(console, f"{images:,} phantom images at 8 sites, {wrong} of them with a wrong label, in {folder}")
    say(console, f"fedsir audit {folder / MANIFEST} --phantom")


def run_study(
    scenario: str, seeds: str, root: Path | None, splits: int, out: Path | None, overrides: Sequence[str]
) -> None:
    """Audit consortia with planted errors and print how often the audit was right. Raises BadInput."""
    numbers = parse_seeds(seeds)
    phantom = scenario != KERMANY
    config = audit_config(None, phantom, [*overrides, "data.manifest=none.csv"])
    path = out or config.work_dir / "studies" / f"audit-{scenario}.csv"
    console = new_console()
    with open_session(console, continues=SAME) as session:
        from experiments.audit.audit import AuditPlan
        from experiments.audit.study import planter, study, summary
        from fedsir.audit.settings import AuditSettings

        planted = planter(session, config, scenario, root)
        plan = AuditPlan(AuditSettings(splits=splits), seeds=(0,), stage_one_splits=1, training_seeds=(0,))
        rows = study(session, config, scenario, planted, numbers, plan, path, partial(say, console))
        lines = summary(rows)
    table = Table(title=f"audits of {scenario} ({'phantom' if phantom else 'real'} images)", show_header=False)
    for name, value in lines:
        table.add_row(name, value)
    console.print(table)
    say(console, f"verdicts in {path}")
