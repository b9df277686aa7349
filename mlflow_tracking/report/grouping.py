"""What may stand side by side: finished runs of one task at one budget."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from mlflow_tracking.report.paper import TASKS

NO_NOISE = "none"
"""`noise` of runs without any."""


@dataclass(frozen=True)
class TaskRuns:
    """Runs of one task with equal budget and images. only_budget: the task has no other."""

    task: str
    budget: str
    only_budget: bool
    runs: pd.DataFrame


def by_task_and_budget(runs: pd.DataFrame) -> list[TaskRuns]:
    """By task in the paper's order, then by name; of a task the budget with most runs first, of equals the newest."""
    known = [task for task in TASKS if (runs["task"] == task).any()]
    found = []
    for task in [*known, *sorted(set(runs["task"]) - set(known))]:
        of_task = runs[runs["task"] == task]
        sizes = of_task.groupby("budget").agg(number=("seed", "size"), newest=("started", "max"))
        budgets = sizes.sort_values(["number", "newest"], ascending=False).index.tolist()
        found += [TaskRuns(task, str(b), len(budgets) == 1, of_task[of_task["budget"] == b]) for b in budgets]
    return found
