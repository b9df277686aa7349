"""What the console shows: one live line while a run works, tables at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments.config import RunFile
from fedsir.events import Event, RoundFinished, RunFinished, RunResult, RunStarted, RunStopped


def percent(value: float | None) -> str:
    """0.8736 as `87.4`; a dash where undefined."""
    return "–" if value is None or isnan(value) else f"{100 * value:.1f}"


class LiveLine:
    """Recorder that keeps one progress line; prints nothing else while the run works."""

    def __init__(self, console: Console, label: str) -> None:
        self._console = console
        self._label = label
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def record(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, RoundFinished) and self._progress is not None:
            metrics = event.record.metrics
            shown = f"accuracy {percent(metrics['test/accuracy'])}"
            if "ident/accuracy" in metrics:
                shown += f" · clients {percent(metrics['ident/accuracy'])}"
            if "relabel/residual" in metrics:
                shown += f" · wrong labels left {percent(metrics['relabel/residual'])}"
            self._progress.update(self._task, completed=event.record.round, shown=shown)
            for note in event.record.notes:
                self._progress.console.print(f"[yellow]round {event.record.round}: {note}[/yellow]", highlight=False)
        elif isinstance(event, (RunFinished, RunStopped)):
            self.stop()

    def _start(self, event: RunStarted) -> None:
        done = len(event.history)
        if done:
            self._console.print(f"{self._label}: continuing after round {done}", highlight=False)
        for note in (*event.dataset.notes, *event.facts.notes):
            self._console.print(f"[dim]note: {note}[/dim]", highlight=False)
        self._progress = Progress(
            TextColumn(self._label),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._progress.start()
        total = event.config.training.rounds
        self._task = self._progress.add_task("", total=total, completed=done, shown="starting")

    def stop(self) -> None:
        """Leave the line as it is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


@contextmanager
def data_progress(console: Console) -> Iterator[_DataLine]:
    """A progress bar for decoding images, shown only when there is something to decode."""
    line = _DataLine(console)
    try:
        yield line
    finally:
        line.stop()


class _DataLine:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
        if done >= total:
            self.stop()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()


def final_table(config: RunFile, result: RunResult, kind: str) -> Table:
    """Figures of the last round of one run."""
    final = result.final
    table = Table(title=f"{config.name}, {config.method.name}, seed {config.seed} ({kind} images), last round")
    table.add_column("figure")
    table.add_column("value", justify="right")
    low, high = percent(final["final/accuracy_low"]), percent(final["final/accuracy_high"])
    confidence = f"{100 * config.evaluation.confidence:g} %"
    table.add_row("accuracy %", f"{percent(final['final/accuracy'])}  ({confidence} bootstrap {low}–{high})")
    table.add_row("macro-F1 %", percent(final["test/macro_f1"]))
    table.add_row("balanced accuracy %", percent(final["test/balanced_accuracy"]))
    if result.identification is not None and result.predicted_noisy is not None:
        figures = result.identification_figures
        table.add_section()
        named = ", ".join(str(k) for k in (~result.predicted_noisy).nonzero()[0])
        table.add_row("clients called clean", named)
        table.add_row("clients identified correctly %", percent(figures["accuracy"]))
        table.add_row("noisy called clean / clean called noisy", _counts(figures))
        table.add_row("margin (SD between groups)", f"{figures['margin']:.2f}")
    if result.labels is not None and "relabel/edit" in final:
        table.add_section()
        for key, text in (
            ("edit", "labels changed %"),
            ("recovery", "wrong labels recovered %"),
            ("precision", "changes that were right %"),
            ("false_correction", "right labels spoiled %"),
            ("residual", "wrong labels left %"),
        ):
            table.add_row(text, percent(final.get(f"relabel/{key}")))
    table.add_section()
    table.add_row("seconds", f"{result.seconds:.1f}")
    table.add_row("weights", result.weights_hash[:16])
    return table


def _counts(figures: Mapping[str, float]) -> str:
    return f"{figures['missed_noisy']:.0f} / {figures['accused_clean']:.0f}"


def comparison_table(title: str, results: Mapping[str, Sequence[RunResult]]) -> Table:
    """Methods as rows, seeds as columns: last-round accuracy, mean, spread and identification."""
    seeds = [r.config.seed for r in next(iter(results.values()))]
    table = Table(title=title)
    table.add_column("method")
    for seed in seeds:
        table.add_column(f"seed {seed}", justify="right")
    if len(seeds) > 1:
        table.add_column("mean ± SD", justify="right")
    table.add_column("macro-F1", justify="right")
    table.add_column("clients found", justify="right")
    table.add_column("margin", justify="right")
    table.add_column("seconds", justify="right")
    for method, runs in results.items():
        accuracies = [r.final["final/accuracy"] for r in runs]
        row = [method, *(percent(a) for a in accuracies)]
        if len(seeds) > 1:
            row.append(_mean_and_spread(accuracies))
        row.append(percent(_mean([r.final["test/macro_f1"] for r in runs])))
        found = [r for r in runs if r.identification is not None]
        if found:
            right = [int((r.identification_figures["accuracy"]) * _clients(r) + 0.5) for r in found]
            row.append(" ".join(f"{n}/{_clients(r)}" for n, r in zip(right, found, strict=True)))
            row.append(f"{min(r.identification_figures['margin'] for r in found):.2f}")
        else:
            row += ["–", "–"]
        row.append(f"{_mean([r.seconds for r in runs]):.1f}")
        table.add_row(*row)
    return table


def _clients(result: RunResult) -> int:
    return result.config.federation.clients


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_and_spread(values: Sequence[float]) -> str:
    mean = _mean(values)
    spread = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return f"{100 * mean:.1f} ± {100 * spread:.1f}"
