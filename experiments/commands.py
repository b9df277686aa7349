"""What the commands do; apart from `cli`, so that `--help` needs no torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from experiments.config import RunFile, load_run_file
from experiments.console import LiveLine, comparison_table, data_progress, final_table
from experiments.session import Session
from fedsir.errors import BadInput
from fedsir.events import RunResult
from fedsir.methods.registry import find_method, method_names

ALL_CLEAN = "all_clean"
"""Not a method: FedAvg on the same federation without noise, the upper reference (methods section 13)."""


def print_configuration(source: str, overrides: Sequence[str]) -> None:
    """Write the resolved configuration as YAML."""
    config = load_run_file(source, overrides)
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")


def run_one(source: str, overrides: Sequence[str], fresh: bool) -> None:
    """Run one run file and print its final table."""
    config = load_run_file(source, overrides)
    console = Console()
    if fresh:
        config.checkpoint_file.unlink(missing_ok=True)
    with _session(console) as session:
        dataset = session.dataset(config)
        result = session.run(config, [LiveLine(console, _label(config))])
    console.print(final_table(config, result, dataset.kind))
    _where(console, config)


def compare_methods(source: str, overrides: Sequence[str], methods: str, seeds: str | None) -> None:
    """Run methods on the same federations, seed by seed, and print one table."""
    base = load_run_file(source, overrides)
    chosen = [m.strip() for m in methods.split(",") if m.strip()]
    numbers = _parse_seeds(seeds) if seeds is not None else [base.seed]
    if not chosen:
        raise BadInput(f"--methods: name at least one of {', '.join([*method_names(), ALL_CLEAN])}.")
    configs = {m: [variant(source, overrides, base, m, seed) for seed in numbers] for m in chosen}
    console = Console()
    results: dict[str, list[RunResult]] = {m: [] for m in chosen}
    with _session(console) as session:
        dataset = session.dataset(base)
        for position in range(len(numbers)):
            for method in chosen:
                config = configs[method][position]
                line = LiveLine(console, f"{method}, seed {config.seed}")
                results[method].append(session.run(config, [line]))
    title = f"{base.name} ({dataset.kind} images): last-round accuracy %, {base.training.rounds} rounds"
    console.print(comparison_table(title, results))
    _where(console, base)


def variant(source: str, overrides: Sequence[str], base: RunFile, method: str, seed: int) -> RunFile:
    """The run file of another method and seed on the same federation; settings stay with the method they are for."""
    changed = [*overrides, f"seed={seed}"]
    if method == ALL_CLEAN:
        return load_run_file(source, [*changed, "method.name=fedavg", "federation.noise.type=none"])
    if method == base.method.name:
        return load_run_file(source, changed)
    find_method(method)
    return load_run_file(source, [*changed, f"method.name={method}"])


def list_methods() -> None:
    """Print the known methods."""
    table = Table()
    for column in ("method", "what it does", "source"):
        table.add_column(column)
    for name in method_names():
        entry = find_method(name)
        table.add_row(name, entry.summary, entry.source)
    table.add_row(ALL_CLEAN, "FedAvg on the federation without noise (compare only)", "upper reference")
    Console().print(table)


def inspect_data(source: str, overrides: Sequence[str]) -> None:
    """Print what the images are and how the federation deals them."""
    from fedsir.data.check import describe
    from fedsir.federation.build import build_federation
    from fedsir.federation.report import federation_rows

    config = load_run_file(source, overrides)
    console = Console()
    with _session(console) as session:
        dataset = session.dataset(config)
    facts = describe(dataset)
    table = Table(title=f"{facts.name} ({facts.kind} images, {facts.image_size[1]}x{facts.image_size[0]})")
    for column in ("class", "train images", "train patients", "test images", "test patients"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for name in facts.class_names:
        parts = (facts.train.images, facts.train.patients, facts.test.images, facts.test.patients)
        table.add_row(name, *(str(part[name]) for part in parts))
    table.add_section()
    totals = (
        facts.train.total_images,
        facts.train.total_patients,
        facts.test.total_images,
        facts.test.total_patients,
    )
    table.add_row("all", *(str(n) for n in totals))
    console.print(table)
    federation, truth, drawn = build_federation(
        dataset.train.labels, dataset.train.patients, dataset.class_names, config.federation, config.seed
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
    for note in (*facts.notes, *drawn.notes):
        console.print(f"note: {note}", highlight=False)
    console.print(f"digest {facts.digest[:16]}", highlight=False)


def rebuild_pretext_weights(out: Path) -> None:
    """Train the pretext weights anew and write them to `out`."""
    from fedsir.models.pretext import pretrain, save

    console = Console()
    if not out.parent.is_dir():
        raise BadInput(f"no such folder: {out.parent}.")
    features = pretrain(on_epoch=lambda epoch, loss: console.print(f"epoch {epoch + 1}: loss {loss:.4f}"))
    save(features, out)
    console.print(f"wrote {out}")


@contextmanager
def _session(console: Console) -> Iterator[Session]:
    _quiet_libraries()
    with data_progress(console) as progress:
        session = Session(progress)
        try:
            yield session
        finally:
            session.close()


def _quiet_libraries() -> None:
    # Their hints are about features that are not used here and would break the live line.
    for name in ("lightning", "lightning.fabric", "lightning.pytorch", "ray", "alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")


def _label(config: RunFile) -> str:
    return f"{config.name}: {config.method.name}, seed {config.seed}"


def _where(console: Console, config: RunFile) -> None:
    console.print(
        f"recorded in {config.tracking.uri}, experiment {config.tracking.experiment}\n"
        f"see it with: mlflow ui --backend-store-uri {config.tracking.uri}",
        highlight=False,
    )


def _parse_seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise BadInput(f"--seeds {text}: expected numbers such as 0,1,2 or a range such as 0-4.")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds or len(set(seeds)) != len(seeds):
        raise BadInput(f"--seeds {text}: give at least one seed, each once.")
    return seeds
