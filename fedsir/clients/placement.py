"""Where actors go: bundles of GPUs that are reserved together, or nodes that share the actors evenly.

Ray packs fractions of GPUs onto the first GPU it finds. So every GPU gets a bundle of its own in one placement group,
and actor i goes to bundle i mod n. Without GPUs nothing is reserved: on several nodes each actor is bound to one, in
proportion to their cores; on one node Ray places them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from fedsir.clients.sizing import Node
from fedsir.errors import BadInput

MOVE_S = 10.0
"""How long is waited for Ray to reserve a lost bundle on another node."""


@dataclass(frozen=True)
class Layout:
    """Who goes where.

    cpus, gpus: share of each actor. homes: per actor the position of its bundle, or of its node where there are no
    bundles. bundles: resources that are reserved together.
    """

    cpus: float
    gpus: float
    homes: tuple[int, ...]
    bundles: tuple[Mapping[str, float], ...] = ()


def plan_layout(actors: int, fraction: float, threads: int, nodes: Sequence[Node]) -> Layout:
    """Spread actors, each with `fraction` of a GPU and up to `threads` cores, over nodes that can hold them.

    Where there are fewer cores than that, actors share them: Ray counts CPUs logically and would wait for ever.
    """
    return _over_gpus(actors, fraction, threads, nodes) if fraction > 0 else _over_nodes(actors, threads, nodes)


def _over_gpus(actors: int, fraction: float, threads: int, nodes: Sequence[Node]) -> Layout:
    each = max(1.0, fraction)
    places = {n: int(n.gpus / each) for n in nodes if int(n.gpus / each) > 0}
    count = min(actors, sum(places.values()))
    # Ray chooses which bundle goes to which node, so they must all fit on the node with the fewest cores per GPU.
    cpus = min(n.cpus / number for n, number in places.items())
    share = min(float(threads), _ray_floor(cpus / ceil(actors / count)))
    homes = tuple(i % count for i in range(actors))
    bundles = tuple({"GPU": each, "CPU": round(share * homes.count(b), 4)} for b in range(count))
    # Ray rounds to 1/10000: six times 0.1667 would be more than one GPU.
    return Layout(share, fraction if fraction >= 1 else max(1e-4, _ray_floor(fraction)), homes, bundles)


def _over_nodes(actors: int, threads: int, nodes: Sequence[Node]) -> Layout:
    counts = [0] * len(nodes)
    homes = []
    for _ in range(actors):
        # Each goes where it has most cores for itself, which is turn and turn about on equal nodes.
        home = max(range(len(nodes)), key=lambda n: nodes[n].cpus / (counts[n] + 1))
        counts[home] += 1
        homes.append(home)
    cpus = min(nodes[n].cpus / counts[n] for n in set(homes))
    return Layout(min(float(threads), _ray_floor(cpus)), 0.0, tuple(homes))


def _ray_floor(amount: float) -> float:
    return floor(amount * 1e4 + 1e-6) / 1e4


def live_nodes() -> list[Node]:
    """The nodes of the cluster that are alive, by name."""
    nodes = []
    for entry in ray.nodes():  # type: ignore[no-untyped-call]
        if entry["Alive"]:
            have = entry["Resources"]
            name = f"{entry['NodeManagerAddress']} ({entry['NodeID'][:6]})"
            nodes.append(Node(entry["NodeID"], name, float(have.get("CPU", 0.0)), float(have.get("GPU", 0.0))))
    return sorted(nodes, key=lambda node: (node.name, node.id))


def _free() -> dict[str, dict[str, float]]:
    return available_resources_per_node()  # type: ignore[no-untyped-call, no-any-return]


def free_table() -> str:
    """One line for each node: what of its CPUs and GPUs nobody holds at present."""
    free = _free()
    lines = []
    for node in live_nodes():
        have = free.get(node.id, {})
        lines.append(
            f"  node {node.name}: {have.get('CPU', 0.0):g} of {node.cpus:g} CPU, "
            f"{have.get('GPU', 0.0):g} of {node.gpus:g} GPU free"
        )
    return "\n".join(lines)


class Placement:
    """The places of a pool's actors, by slot."""

    def __init__(self, layout: Layout, nodes: Sequence[Node], timeout_s: float) -> None:
        """Reserve what is to be reserved. Raises BadInput when Ray cannot within `timeout_s`.

        nodes: those that `layout` was planned for.
        """
        self.layout = layout
        self._homes = [nodes[home].id for home in layout.homes] if not layout.bundles else []
        # Ray dies with its only node; there is nothing to choose.
        self._single = len(nodes) == 1
        self._group: Any = None
        self._given_up: set[int] = set()
        if layout.bundles:
            self._group = placement_group([dict(bundle) for bundle in layout.bundles], strategy="PACK")
            if not self._group.wait(timeout_s):
                self.close()
                raise BadInput(self.shortage(timeout_s))

    def options(self, slot: int) -> dict[str, Any]:
        """Options of Ray for the actor of a slot."""
        options: dict[str, Any] = {"num_cpus": self.layout.cpus, "num_gpus": self.layout.gpus}
        if self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self.layout.homes[slot]
            )
        elif not self._single:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._homes[slot], soft=False)
        return options

    def holds(self, slot: int) -> bool:
        """Whether the place of a slot is there: its node has not died."""
        if self._group is not None:
            return bool(placement_group_table(self._group)["bundles_to_node_id"][self.layout.homes[slot]])
        return self._single or self._homes[slot] in {node.id for node in live_nodes()}

    def move(self, slot: int) -> bool:
        """Find another place for a slot whose node has died, if there is one; whether the slot has a place now."""
        if self._group is not None:
            # Ray looks for another node by itself, and takes one that has joined since.
            bundle = self.layout.homes[slot]
            until = time.monotonic() + (0.0 if bundle in self._given_up else MOVE_S)
            while not (found := self.holds(slot)) and time.monotonic() < until:
                time.sleep(0.1)
            self._given_up.discard(bundle)
            if not found:
                self._given_up.add(bundle)
            return found
        if self.holds(slot):
            return True
        free = _free()
        room = {}
        for node in live_nodes():
            # What was started a moment ago may not be counted by Ray yet.
            ours = self.layout.cpus * self._homes.count(node.id)
            room[node.id] = min(free.get(node.id, {}).get("CPU", 0.0), node.cpus - ours)
        best = max(room, key=room.__getitem__)
        if room[best] < self.layout.cpus:
            return False
        self._homes[slot] = best
        return True

    def shortage(self, timeout_s: float) -> str:
        """What to tell the user when actors have not started within `timeout_s`: requested against available."""
        layout = self.layout
        wanted = f"{len(layout.homes)} actors ({layout.cpus:g} CPU, {layout.gpus:g} GPU each"
        if layout.bundles:
            first = layout.bundles[0]
            wanted += f"; {len(layout.bundles)} bundles of {first['GPU']:g} GPU and up to {first['CPU']:g} CPU"
        return (
            f"execution: {wanted}) did not start within {timeout_s:g} s. Ray has\n{free_table()}\n"
            "Lower execution.actors or execution.gpus_per_client, or raise execution.startup_timeout_s if others will "
            "release theirs."
        )

    def close(self) -> None:
        """Release what was reserved."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
