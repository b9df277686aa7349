"""What is meant for a store that may be out of reach: points that can come later, and calls that wait for the store.

Nothing is written to disk here: a run's checkpoint holds all of its rounds, and is written before they are reported.

A call that failed may have had its effect all the same, when only its answer was lost. So what is called again must do
no harm by it, and points are sent again only after the store was asked which of them it has. A batch that is still on
its way then does no harm either: its points carry the same times, and MLflow keeps equal points once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeVar

from fedsir.errors import StoreUnreachable
from mlflow_tracking.config import shown_uri
from mlflow_tracking.outage import is_outage, reason
from mlflow_tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

# MLflow refuses larger batches: metrics, parameters and tags together.
ENTITIES_PER_BATCH = 1000

T = TypeVar("T")
Point = tuple[str, float, int]  # key, value, step


@dataclass
class Points:
    """Points of one MLflow run, each of which the store is to get once.

    logged: every (key, step) already in the store. unsent: points that are not, in order, and `sent` when the latest
    ones were (seconds on the monotonic clock). doubtful: whether a call failed that may have brought some of them.
    """

    mlflow_id: str
    logged: set[tuple[str, int]] = field(default_factory=set)
    unsent: dict[tuple[str, int], Metric] = field(default_factory=dict)
    sent: float = -math.inf
    doubtful: bool = False

    @property
    def idle_s(self) -> float:
        """Seconds since points were sent."""
        return monotonic() - self.sent

    def take(self, points: Iterable[Point]) -> None:
        """Keep points that the store lacks until they are sent, as of now."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for key, value, step in points:
            if (key, step) not in self.logged:
                self.unsent.setdefault((key, step), Metric(key, value, now, step))

    def look_up(self, client: MlflowClient, keys: Iterable[str]) -> None:
        """Learn which points of these keys the store has."""
        for key in keys:
            for point in client.get_metric_history(self.mlflow_id, key):
                self.logged.add((key, point.step))
                self.unsent.pop((key, point.step), None)

    def send(self, client: MlflowClient, params: Sequence[Param] = (), tags: Sequence[RunTag] = ()) -> None:
        """Everything unsent, with `params` and `tags`, in as few calls as MLflow allows; also again after it failed."""
        if self.doubtful:
            self.look_up(client, list(dict.fromkeys(key for key, _ in self.unsent)))
        self.doubtful = True
        while self.unsent or params or tags:
            points = list(islice(self.unsent.items(), ENTITIES_PER_BATCH - len(params) - len(tags)))
            client.log_batch(self.mlflow_id, metrics=[metric for _, metric in points], params=params, tags=tags)
            for place, _ in points:
                del self.unsent[place]
                self.logged.add(place)
            params, tags = (), ()
        self.doubtful = False
        self.sent = monotonic()


class Insist(Protocol):
    """Makes a call as soon as the store can be reached; `again` in its place once it has failed."""

    def __call__(self, call: Callable[[], T], again: Callable[[], T] | None = None) -> T: ...


def attempt(store: Store, call: Callable[[], T]) -> T:
    """What `call` returns, which has the store to itself meanwhile; what it learns of the store holds for everybody.

    That the store is out of reach, and that it is back, is said once, however many runs are recorded in it.
    """
    log = logging.getLogger(__name__)
    with store.lock:
        begin = monotonic()
        try:
            result = call()
        except Exception as error:
            if is_outage(error) and store.reach.lost(monotonic() - begin):
                log.warning(
                    "%s cannot be used just now: %s. Runs go on; checkpoints keep what it lacks until it is back.",
                    shown_uri(store.uri),
                    reason(error),
                )
            raise
        seconds = store.reach.found()
        if seconds is not None:
            log.warning("%s can be used again, after %.0f s.", shown_uri(store.uri), math.ceil(seconds))
        return result


def patiently(
    store: Store,
    call: Callable[[], T],
    patience_s: float,
    stopping: threading.Event | None = None,
    again: Callable[[], T] | None = None,
    since_lost: bool = False,
) -> T:
    """What `call` returns as soon as the store can be reached; others may use the store while this waits.

    again: called in its place once it has failed. since_lost: patience counts from when the store went out of reach, so
    that of many who come one after the other only the first has to wait; the others try it if nobody has just done so.
    Errors that are no outage are raised at once. Raises StoreUnreachable when the store has been out of reach for
    `patience_s` seconds, or as soon as `stopping` is set.
    """
    stopping = threading.Event() if stopping is None else stopping
    begin = monotonic() - (store.reach.lost_for if since_lost else 0.0)
    deadline = begin + patience_s
    while True:
        # The last try is made when patience ends, whatever others have seen; without patience it is the only one.
        pause = min(store.reach.pause, deadline - monotonic())
        if pause > 0 and stopping.wait(pause):
            raise StoreUnreachable(f"{shown_uri(store.uri)} could not be used when the run was stopped")
        with store.lock:
            last = monotonic() >= deadline
            if store.reach.pause and not last:
                continue  # somebody else has just tried
            if store.reach.pause and since_lost:
                # And will not be back for this one: a try may take a minute, and many may come.
                raise StoreUnreachable(
                    f"{shown_uri(store.uri)} could not be used for {store.reach.lost_for:.0f} s "
                    "(setting tracking.patience_s)"
                )
            try:
                return attempt(store, call)
            except Exception as error:
                if not is_outage(error):
                    raise
                if last or monotonic() >= deadline:
                    seconds = monotonic() - begin
                    waited = f" for {seconds:.0f} s (setting tracking.patience_s)" if seconds >= 1 else ""
                    raise StoreUnreachable(
                        f"{shown_uri(store.uri)} could not be used{waited}: {reason(error)}"
                    ) from error
                call = again or call
