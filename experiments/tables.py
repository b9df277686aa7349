"""Tables at the end of a command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean, stdev

from rich.table import Table

from experiments.config import RunFile
from experiments.console import percent
from fedsir.events import RunResult


def final_table(config: RunFile, result: RunResult, kind: str) -> Table:
    """Figures of the last round of one run."""
    final = result.final
    table = Table(title=f"{config.name}, {config.method.label}, seed {config.seed} ({kind} images), last round")
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
        if isfinite(figures["margin"]):
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
    table.add_row("client-epochs of training", f"{result.totals['cost/client_epochs']:.0f}")
    table.add_row("forward passes beside it", f"{result.totals['cost/forward_units']:.0f}")
    table.add_row("MB up / down", f"{result.totals['bytes/up'] / 1e6:.1f} / {result.totals['bytes/down'] / 1e6:.1f}")
    table.add_row("seconds", f"{result.seconds:.1f}")
    table.add_row("weights", result.weights_hash[:16])
    return table


def _counts(figures: Mapping[str, float]) -> str:
    return f"{figures['missed_noisy']:.0f} / {figures['accused_clean']:.0f}"


def comparison_table(title: str, results: Mapping[str, Sequence[RunResult]]) -> Table:
    """Per method one row per seed and, with several seeds, mean ± SD of the accuracy and means of the rest.

    client-epochs: passes of training over a client's images, stage I included.
    """
    table = Table(title=title)
    table.add_column("method", no_wrap=True)
    table.add_column("seed", justify="right", no_wrap=True)
    for name in ("accuracy %", "macro-F1\n%", "client-\nepochs", "seconds"):
        # Narrow enough for 80 characters.
        table.add_column(name, justify="right", no_wrap=True)
    for method, runs in results.items():
        epochs = [r.totals["cost/client_epochs"] for r in runs]
        for position, (run, spent) in enumerate(zip(runs, epochs, strict=True)):
            table.add_row(
                method if position == 0 else "",
                str(run.config.seed),
                percent(run.final["final/accuracy"]),
                percent(run.final["test/macro_f1"]),
                f"{spent:.0f}",
                f"{run.seconds:.1f}",
            )
        if len(runs) > 1:
            accuracy = mean_and_spread([r.final["final/accuracy"] for r in runs])
            f1 = fmean(r.final["test/macro_f1"] for r in runs)
            seconds = fmean(r.seconds for r in runs)
            table.add_row("", "mean", accuracy, percent(f1), f"{fmean(epochs):.0f}", f"{seconds:.1f}", style="bold")
        table.add_section()
    return table


RELABELING = ("edit", "recovery", "precision", "false_correction", "residual")


def noise_table(title: str, results: Mapping[str, Sequence[RunResult]]) -> Table | None:
    """What methods found out about the noise, means over seeds; None where no method says anything about it.

    right: clients judged rightly as clean or noisy. margin: gap between the truly noisy and the truly clean
    clients in standard deviations. The rest is about labels, as in the paper's Table 3.
    """
    table = Table(title=title)
    table.add_column("method", overflow="fold")
    headings = ("right\n%", "margin", "edit\n%", "recov.\n%", "prec.\n%", "false\n%", "resid.\n%")
    for name in headings:
        table.add_column(name, justify="right", no_wrap=True)
    for method, runs in results.items():
        verdicts = [r for r in runs if r.predicted_noisy is not None]
        relabeled = [r for r in runs if r.label_history]
        if not verdicts and not relabeled:
            continue
        shares = [_mean(r.final.get(f"relabel/{key}") for r in relabeled) for key in RELABELING]
        margin = _mean(r.identification_figures.get("margin") for r in verdicts)
        table.add_row(
            method,
            percent(_mean(r.identification_figures.get("accuracy") for r in verdicts)),
            "–" if margin is None else f"{margin:.2f}",
            *(percent(share) for share in shares),
        )
    return table if table.row_count else None


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of the figures that exist."""
    known = [v for v in values if v is not None and isfinite(v)]
    return fmean(known) if known else None


def mean_and_spread(values: Sequence[float]) -> str:
    """Shares as `85.3 ± 1.2` percent, with the sample standard deviation."""
    return f"{100 * fmean(values):.1f} ± {100 * stdev(values):.1f}"
