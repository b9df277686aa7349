"""What must be equal for runs to share a cell beside condition, method and seed, and how it is said.

The store's parameters hold nearly all of it. What they leave out (the number of clean clients that was asked for) or
cut short (settings of methods) is read from the run's `config.yaml`, where its artifacts are in a folder that can be
read here; others are compared by their parameters alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import yaml

LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
CONFIG_FILE = "config.yaml"

# Parameters that make a budget, in the order in which they are said. Not among them: condition, method and seed; what
# the draw gave (clean and noisy clients); where a run went on (device, threads).
BUDGET_PARAMS = (
    "rounds",
    "local_epochs",
    "batch_size",
    "lr",
    "weight_decay",
    "backbone",
    "weights",
    "dropout",
    "precision",
    "image_size",
    "horizontal_flip",
    "dataset",
    "data_kind",
    "source",
    "cohort",
    "data_seed",
    "classes",
    "train_images",
    "test_images",
    "clients",
    "clean_selection",
    "public_pool",
    "partition",
)
# Of `config.yaml`: what parameters do not say.
BUDGET_KEYS = ("federation.clean_clients", "data.transform.mean", "data.transform.std")
WORDS = {
    "rounds": "{} rounds",
    "local_epochs": "{} local epochs",
    "batch_size": "batch {}",
    "participation": "participation {}",
    "lr": "lr {}",
    "weight_decay": "weight decay {}",
    "image_size": "{} px",
    "data_kind": "{} images",
    "train_images": "{} training images",
    "test_images": "{} test images",
    "clients": "{} clients",
    "digest": "images {}",
    "federation.clean_clients": "{} clean",
}
COUNTED = ("rounds", "local_epochs", "train_images", "test_images", "clients")

Budget = tuple[tuple[str, str], ...]


def budget_of(params: Mapping[str, str], config: Mapping[str, Any] | None, digest: str) -> Budget:
    """Everything that must be equal, as (name, value) pairs. digest: of the images, empty if unknown."""
    pairs = [(key, params[key]) for key in BUDGET_PARAMS if key in params]
    # Runs recorded before there was a choice have no such parameter.
    pairs.append(("participation", params.get("participation", "1")))
    pairs.append(("digest", digest[:8]))
    if config is not None:
        pairs += [(key, str(config[key])) for key in BUDGET_KEYS if key in config]
    return tuple(pairs)


def completed(budgets: Sequence[tuple[Hashable, Budget]]) -> list[Budget]:
    """`budgets`, of a task each, where those of runs whose `config.yaml` could not be read take over what it would say
    from the others, provided that these agree."""
    known: dict[Hashable, set[Budget]] = defaultdict(set)
    for task, budget in budgets:
        core, extra = _parted(budget)
        if extra:
            known[task, core].add(extra)
    out = []
    for task, budget in budgets:
        core, extra = _parted(budget)
        told = known[task, core]
        out.append(core + (next(iter(told)) if not extra and len(told) == 1 else extra))
    return out


def _parted(budget: Budget) -> tuple[Budget, Budget]:
    extra = tuple(pair for pair in budget if pair[0] in BUDGET_KEYS)
    return tuple(pair for pair in budget if pair[0] not in BUDGET_KEYS), extra


def said(budget: Budget) -> str:
    """A whole budget in words."""
    return ", ".join(_word(key, value) for key, value in budget if value not in ("", "-"))


def short_names(budgets: Iterable[Budget]) -> dict[Budget, str]:
    """Of the budgets of one task: rounds × local epochs, and whatever else tells them apart."""
    distinct = list(dict.fromkeys(budgets))
    differing = _differing([dict(b) for b in distinct])
    names = {}
    for budget in distinct:
        values = dict(budget)
        first = (
            f"{_word('rounds', values.get('rounds', '?'))} × {_word('local_epochs', values.get('local_epochs', '?'))}"
        )
        rest = [_word(k, values.get(k, "unknown")) for k in differing if k not in ("rounds", "local_epochs")]
        names[budget] = ", ".join([first, *rest])
    return names


def setting_names(settings: Iterable[Mapping[str, str]]) -> list[str]:
    """What tells several settings of one method apart, in words; empty texts where nothing does."""
    several = list(settings)
    differing = _differing(several)
    return [", ".join(f"{key}={values.get(key, '-')}" for key in differing) for values in several]


def _differing(several: Sequence[Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for values in several for key in values)
    return [key for key in keys if len({values.get(key) for values in several}) > 1]


def _word(key: str, value: str) -> str:
    said = WORDS[key].format(value) if key in WORDS else f"{key} {value}"
    return said.removesuffix("s") if value == "1" and key in COUNTED else said


def parsed_config(text: str) -> dict[str, Any]:
    """A `config.yaml` with dotted keys; empty where it is damaged.

    Many runs share most sections to the letter, so each section is read once.
    """
    flat: dict[str, Any] = {}
    for section in re.split(r"^(?=[a-z_]+:)", text, flags=re.MULTILINE):
        flat.update(_section(section))
    return flat


@lru_cache(maxsize=4096)
def _section(text: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, Loader=LOADER)
    except yaml.YAMLError:
        return {}
    return dict(_flat(values)) if isinstance(values, dict) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
