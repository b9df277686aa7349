"""What the commands of `fedsir sweep` do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from experiments.commands import open_session
from experiments.compare import ALL_CLEAN
from experiments.console import say, waiting
from experiments.expansion import Plan, absent_files, expand, parse_shard, require_complete
from experiments.grid import SEED, load_grid
from experiments.sweeps.tables import outcome_table, plan_table, status_table
from fedsir.errors import BadInput
from mlflow_tracking.config import TrackingConfig, shown_uri

MAX_NAMED = 10


def plan_grid(source: str, only: Sequence[str], overrides: Sequence[str]) -> None:
    """Print what a grid asks for and what it lacks."""
    plan = _expanded(source, only, overrides)
    console = Console()
    console.print(plan_table(plan))
    for line in count_lines(plan):
        say(console, line)
    if plan.missing:
        say(console, "Before it can run:")
        for key in plan.missing:
            say(console, f"  --set {key}=VALUE")
    for fault in absent_files(plan):
        say(console, fault, "yellow")


def count_lines(plan: Plan) -> list[str]:
    """Conditions, results and runs in words."""
    per_label = Counter(cell.method for cell in plan.cells)
    conditions = len({cell.condition for cell in plan.cells})
    ordinary = [m for m in per_label if m != ALL_CLEAN]
    results, clean = sum(per_label[m] for m in ordinary), per_label[ALL_CLEAN]
    lines = []
    if ordinary:
        lines.append(
            f"{_many(conditions, 'condition')} × {_many(len(ordinary), 'method')} × "
            f"{_many(len(plan.chosen[SEED]), 'seed')}: {_many(results, 'method run')}"
            + ("" if not plan.grid.exclude else ", without what the grid excludes")
        )
    if clean:
        runs = sum(run.cells[0].method == ALL_CLEAN for run in plan.runs)
        lines.append(f"all_clean: {_many(clean, 'result')} from {_many(runs, 'run')}, as it does not depend on noise")
    return [*lines, f"distinct runs: {len(plan.runs)} for {_many(len(plan.cells), 'result')}"]


def run_grid(
    source: str,
    only: Sequence[str],
    overrides: Sequence[str],
    shard: str | None,
    limit: int | None,
    retry: bool = False,
) -> bool:
    """Run what the record lacks, or with `retry` what has failed; whether no run of it has failed."""
    part = None if shard is None else parse_shard(shard)
    plan = _runnable(source, only, overrides)
    if part is not None:
        plan = plan.shard(*part)
    if not plan.runs:
        say(Console(), f"nothing in shard {shard}: the grid has fewer conditions and seeds than shards")
        return True
    tracking = _tracking(plan)
    console = Console()
    with open_session(console, continues=True) as session:
        from experiments.checks import check_execution, check_work_dir
        from experiments.sweeps.sweep import Sweep
        from mlflow_tracking.states import recorded_states

        # Faults of the machine concern every run; they must not be recorded as so many failures.
        for execution, clients in {(r.config.execution, r.config.federation.clients) for r in plan.runs}:
            check_execution(execution, clients)
        check_work_dir(plan.runs[0].config)
        store = session.store(plan.runs[0].config)
        with waiting(console, "reading the MLflow store"):
            states = recorded_states(store, [run.identity for run in plan.runs])
        tally = Sweep(session, console, states).run(plan.runs, limit, retry)
    console.print(outcome_table(f"grid {plan.grid.name}", tally))
    failed = [*tally.failed, *tally.failed_before]
    for run in failed[:MAX_NAMED]:
        say(console, f"failed: {run.label}", "red")
    if len(failed) > MAX_NAMED:
        say(console, f"and {len(failed) - MAX_NAMED} more")
    if failed:
        say(console, "reasons: fedsir sweep status; again: fedsir sweep retry")
    say(console, f"recorded in {shown_uri(tracking.uri)}, experiment {tracking.experiment}")
    return tally.all_well


def grid_status(source: str, only: Sequence[str], overrides: Sequence[str]) -> None:
    """Print what the store holds of a grid."""
    plan = _expanded(source, only, overrides)
    require_complete(plan)
    tracking = _tracking(plan)
    console = Console()
    with waiting(console, "reading the MLflow store"):
        from mlflow_tracking.states import recorded_states
        from mlflow_tracking.store import check_store, prepare_store

        looked = check_store(tracking)
        # Looking at a grid that has not begun creates nothing.
        empty = looked.reachable and looked.runs == 0
        states = {} if empty else recorded_states(prepare_store(tracking), [run.identity for run in plan.runs])
    console.print(status_table(plan, states))
    for run in plan.runs:
        state = states.get(run.identity)
        if state is not None and state.status == "failed":
            reason = state.error.strip().splitlines()[0] if state.error.strip() else "no reason is recorded"
            say(console, f"failed: {run.label}: {reason}", "red")
    say(console, f"store {shown_uri(tracking.uri)}, experiment {tracking.experiment}")


def _runnable(source: str, only: Sequence[str], overrides: Sequence[str]) -> Plan:
    plan = _expanded(source, only, overrides)
    require_complete(plan)
    absent = absent_files(plan)
    if absent:
        raise BadInput("\n".join([f"grid {plan.grid.name}: images cannot be found.", *absent]))
    return plan


def _expanded(source: str, only: Sequence[str], overrides: Sequence[str]) -> Plan:
    grid = load_grid(source)
    try:
        return expand(grid, only, overrides)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error


def _tracking(plan: Plan) -> TrackingConfig:
    """The one store of all runs. Raises BadInput where there are several."""
    found = list(dict.fromkeys((r.config.tracking.uri, r.config.tracking.experiment) for r in plan.runs))
    if len(found) > 1:
        shown = ", ".join(f"{shown_uri(uri)} ({experiment})" for uri, experiment in found)
        raise BadInput(
            f"grid {plan.grid.name}: its runs would be recorded in several places: {shown}.\n"
            "Give tracking.uri and tracking.experiment once, under `set` of the grid or with --set."
        )
    return plan.runs[0].config.tracking


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
