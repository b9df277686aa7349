"""All figures of a report, from the record."""

from __future__ import annotations

from mlflow_tracking.report.client_pictures import FLOW, IDENTIFICATION, identification, label_flows
from mlflow_tracking.report.figures import drawing
from mlflow_tracking.report.method_pictures import COST, CURVES, RATIOS, against_cost, over_ratios, over_rounds
from mlflow_tracking.report.selection import groups, noises
from mlflow_tracking.report.sheet import Picture, Pictures, Record, Sheet

SECTIONS = (IDENTIFICATION, RATIOS, CURVES, FLOW, COST)
MAX_GROUPS = 6
"""Tasks and budgets that are drawn; tables hold all of them."""


def draw_pictures(record: Record) -> Pictures:
    """Figures 2 to 4 of the paper, training curves, flow of labels, cost against accuracy, per task and budget."""
    found = groups(record.runs)
    notes = [
        f"{g.task}: no figures of the {len(g.runs)} runs with budget {g.budget}; the tables have them"
        for g in found[MAX_GROUPS:]
    ]
    shown: list[Picture] = []
    with drawing():
        for number, group in enumerate(found[:MAX_GROUPS]):
            sheet = Sheet(record, group, f"f{number}", notes)
            shown += identification(sheet)
            for noise in noises(group.runs):
                shown += over_ratios(sheet, noise)
            shown += [*over_rounds(sheet), *label_flows(sheet), *against_cost(sheet)]
    return Pictures(tuple(sorted(shown, key=lambda picture: SECTIONS.index(picture.section))), tuple(notes))
