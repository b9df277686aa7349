"""What the commands do; apart from `cli`, so that `--help` needs no torch."""

from __future__ import annotations

import gc
import logging
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import yaml
from rich.console import Console
from rich.table import Table

from experiments.compare import ALL_CLEAN, parse_methods, parse_seeds, variant
from experiments.config import RunFile, file_stem, load_execution, load_run_file
from experiments.console import LiveLine, Notes, data_progress, new_console, say, waiting
from experiments.tables import comparison_table, final_table, noise_table
from fedsir.errors import BadInput
from fedsir.loading import loading
from fedsir.methods.registry import find_method, method_names
from mlflow_tracking.config import DEFAULT_URI, shown_uri, sqlite_path

if TYPE_CHECKING:
    from experiments.session import Session
    from fedsir.config.training import ExecutionConfig
    from fedsir.events import RunResult

STOPPED = "fedsir: stopped. {} continues after the last finished round."
SAME = "The same command"


def print_configuration(source: str, overrides: Sequence[str]) -> None:
    """Write the resolved configuration as YAML, which is a run file again."""
    config = load_run_file(source, overrides)
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")


def run_one(source: str, overrides: Sequence[str], fresh: bool) -> None:
    """Run one run file and print its final table."""
    console = new_console()
    execution = load_execution(source, overrides)
    with open_session(console, execution, f"{SAME} without --fresh" if fresh else SAME) as session:
        config = load_run_file(source, overrides)
        label = f"{config.name}: {config.method.label}, seed {config.seed}"
        with _in_order(LiveLine(console, label, Notes(console))) as line:
            result = session.run(config, [line], fresh)
        kind = session.dataset(config).kind
    console.print(final_table(config, result, kind))
    _where(console, config)


def compare_methods(source: str, overrides: Sequence[str], methods: str, seeds: str | None) -> None:
    """Run methods on the same federations, seed by seed, and print one table."""
    chosen = parse_methods(methods)
    given = None if seeds is None else parse_seeds(seeds)
    console = new_console()
    notes = Notes(console)
    results: dict[str, list[RunResult]] = {m: [] for m in chosen}
    with open_session(console, load_execution(source, overrides), SAME) as session:
        base = load_run_file(source, overrides)
        numbers = [base.seed] if given is None else given
        configs = {m: [variant(source, overrides, base, m, seed) for seed in numbers] for m in chosen}
        for position in range(len(numbers)):
            for method in chosen:
                # All of them before the first trains: a seed whose partition is impossible must not come up later.
                session.check(configs[method][position])
        for position in range(len(numbers)):
            for method in chosen:
                config = configs[method][position]
                label = f"{config.name}: {method}, seed {config.seed}"
                with _in_order(LiveLine(console, label, notes)) as line:
                    results[method].append(session.run(config, [line]))
        kind = session.dataset(base).kind
    title = f"{base.name} ({kind} images), last of {base.training.rounds} rounds"
    console.print(comparison_table(title, results))
    noise = noise_table("what methods found out about the noise, means over seeds", results)
    if noise is not None:
        console.print(noise)
    _where(console, base)


def study_identification(
    source: str,
    overrides: Sequence[str],
    methods: tuple[str, ...],
    noise: tuple[tuple[str, float], ...],
    alphas: tuple[float, ...],
    seeds: tuple[int, ...],
    out: Path | None,
) -> None:
    """Run stage I over a grid and print where it tells clean from noisy clients."""
    from experiments.studies.identification import Plan, study
    from experiments.studies.tables import condition_table, summary_table

    base = load_run_file(source, overrides)
    path = out or base.work_dir / "studies" / f"identification-{file_stem(base.name)}.csv"
    console = new_console()
    with open_session(console, continues=SAME) as session:
        kind = session.dataset(base).kind
        plan = Plan(methods, noise, alphas, seeds)
        rows = study(session, source, overrides, plan, path, partial(say, console))
    about = f"{base.name} ({kind} images, {base.federation.clients} clients, seeds {', '.join(map(str, seeds))})"
    say(console, f"identification, {about}: clean-client F1 % by mixture, in brackets the worst margin")
    for method in methods:
        of = [r for r in rows if r.method == method and r.split == "mixture"]
        console.print(condition_table(method, of))
    console.print(summary_table("means over conditions and seeds", rows))
    say(console, f"verdicts in {path}")


def list_methods() -> None:
    """Print the known methods."""
    table = Table()
    for column in ("method", "what it does", "source"):
        table.add_column(column)
    for name in method_names():
        entry = find_method(name)
        table.add_row(name, entry.summary, entry.source)
    table.add_row(ALL_CLEAN, "FedAvg on the federation without noise (compare only)", "upper reference")
    new_console().print(table)


def inspect_data(source: str, overrides: Sequence[str]) -> None:
    """Print what the images are and how the federation deals them."""
    config = load_run_file(source, overrides)
    console = new_console()
    with open_session(console) as session:
        dataset = session.dataset(config)
    from fedsir.data.check import describe
    from fedsir.federation.build import build_federation
    from fedsir.federation.report import federation_rows

    facts = describe(dataset)
    table = Table(title=f"{facts.name} ({facts.kind} images, {facts.image_size[1]}x{facts.image_size[0]})")
    for column in ("class", "train images", "train patients", "test images", "test patients"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for name in facts.class_names:
        parts = (facts.train.images, facts.train.patients, facts.test.images, facts.test.patients)
        table.add_row(name, *(str(part[name]) for part in parts))
    table.add_section()
    totals = (facts.train.total_images, facts.train.total_patients, facts.test.total_images, facts.test.total_patients)
    table.add_row("all", *(str(n) for n in totals))
    console.print(table)
    federation, truth, drawn = build_federation(
        dataset.train.labels,
        dataset.train.patients,
        dataset.class_names,
        config.federation,
        config.seed,
        dataset.train.sites,
    )
    rows = federation_rows(federation, truth)
    dealt = Table(title=f"federation, seed {config.seed}: images per client, true → observed label")
    dealt.add_column("client")
    dealt.add_column("status")
    dealt.add_column("images", justify="right")
    dealt.add_column("wrong labels", justify="right")
    for name in dataset.class_names:
        dealt.add_column(name, justify="right")
    for row in rows:
        classes = [f"{row[f'{n} true']} → {row[f'{n} observed']}" for n in dataset.class_names]
        dealt.add_row(*(str(row[c]) for c in ("client", "status", "images", "wrong labels")), *classes)
    console.print(dealt)
    pool = len(federation.public_pool)
    say(console, f"{pool} image{'s' * (pool != 1)} set aside as the public pool, without labels")
    notes = Notes(console)
    for note in (*facts.notes, *drawn.notes):
        notes(note)
    say(console, f"digest {facts.digest[:16]}")


def rebuild_pretext_weights(out: Path) -> None:
    """Train the pretext weights anew and write them to `out`."""
    if out.is_dir() or not out.parent.is_dir():
        what = f"{out} is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise BadInput(f"{what}.\nName the file to write in a folder that exists, for example tiny.safetensors.")
    from fedsir.models.pretext import pretrain, save

    console = new_console()
    features = pretrain(on_epoch=lambda epoch, loss: console.print(f"epoch {epoch + 1}: loss {loss:.4f}"))
    save(features, out)
    say(console, f"wrote {out}")


@contextmanager
def _in_order(line: LiveLine) -> Iterator[LiveLine]:
    """Stop the line also where a run ends untold, as when its end cannot be recorded."""
    try:
        yield line
    finally:
        line.stop()


@contextmanager
def open_session(
    console: Console,
    execution: ExecutionConfig | None = None,
    continues: str | None = None,
    most_clients: int | None = None,
) -> Iterator[Session]:
    """A session that ends in order however the command ends.

    execution: where there will be work for Ray, which starts at once; otherwise it starts when there is. continues: the
    command that takes up what this one began, in words. most_clients: see `Session`.
    """
    _quiet_libraries()
    try:
        with terminated_like_interrupted(), ExitStack() as stack:
            with waiting(console, "loading torch and Ray"), loading():
                if execution is not None and execution.actors != "in-process":
                    from fedsir.clients.ray_ahead import ray_ahead

                    stack.enter_context(ray_ahead(execution))
                from experiments.session import Session
            with data_progress(console) as progress:
                # Torch, Ray and MLflow are half a million objects, which stay. Looking through all of them for garbage
                # takes half a second in which no client gets work.
                session = Session(progress, partial(waiting, console), most_clients, started=gc.freeze)
                try:
                    yield session
                finally:
                    gc.unfreeze()
                    session.close()
    except (KeyboardInterrupt, SystemExit):
        if continues is not None:
            say(new_console(stderr=True), STOPPED.format(continues))
        raise


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM (batch systems, `kill`) ends a command as Ctrl-C does, so that its record gets a terminal status."""

    came: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        came.append(number)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except SystemExit as stopped:
        # Where the signal finds Ray waiting, it makes an exit with code 1 of it.
        raise SystemExit(128 + came[0] if came else stopped.code) from stopped
    finally:
        signal.signal(signal.SIGTERM, before)


def _quiet_libraries() -> None:
    # Their hints are about features that are not used here and would break the live line.
    for name in ("lightning", "lightning.fabric", "lightning.pytorch", "ray", "alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")


def _where(console: Console, config: RunFile) -> None:
    uri = shown_uri(config.tracking.uri)
    say(console, f"recorded in {uri}, experiment {config.tracking.experiment}")
    if sqlite_path(config.tracking.uri) is not None:
        say(console, "see it with: fedsir ui" + ("" if uri == DEFAULT_URI else f" --tracking-uri {uri}"))
