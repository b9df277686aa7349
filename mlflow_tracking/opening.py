"""The MLflow run that a run is written into: found or created, and told what the run is.

Each call may be made again after it failed, whether or not it had its effect, so that opening can wait for the store.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fedsir.events import RunStarted
from mlflow_tracking.delivery import Insist, Points
from mlflow_tracking.describe import (
    TAG_ERROR,
    TAG_RESUMED,
    TAG_SUPERSEDED,
    dataset_input,
    parameters,
    run_name,
    tags,
)
from mlflow_tracking.outage import is_outage
from mlflow_tracking.states import runs_of
from mlflow_tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Run


class Opening:
    """Of one run. A continued one gets the MLflow run that it had; one that starts anew closes those as superseded."""

    def __init__(self, store: Store, event: RunStarted, parent: str | None, insist: Insist) -> None:
        """parent: id of the MLflow run above it. insist: makes a call as soon as the store can be reached."""
        self._store = store
        self._client = store.client
        self._event = event
        self._parent = parent
        self._insist = insist
        self._reopened: Run | None = None
        self._stale: list[Run] = []

    def find_or_create(self) -> str:
        """Id of the MLflow run."""
        earlier = self._insist(self._unfinished)
        if self._event.history and earlier:
            self._reopened = earlier[0]
            return str(self._reopened.info.run_id)
        self._stale = earlier
        known = {run.info.run_id for run in earlier}
        return self._insist(self._new, partial(self._found_or_new, known))

    def hand_over(self, points: Points) -> None:
        """Send parameters, tags, data set, and those of the points that the store lacks."""
        if self._reopened is None:
            self._send(points, parameters(self._event), {})
            self._insist(partial(self._log_dataset, points.mlflow_id))
        else:
            self._continue(points, self._reopened)
        for stale in self._stale:
            self._supersede(stale, points.mlflow_id)

    def _unfinished(self) -> list[Run]:
        """MLflow runs of this identity that never reached FINISHED, newest first.

        Also those that did if all rounds are done: then the end is in the store, and nobody heard so.
        """
        complete = len(self._event.history) == self._event.config.training.rounds
        found = runs_of(self._store, self._event.run_id)
        return [run for run in found if complete or run.info.status != "FINISHED"]

    def _new(self) -> str:
        created = self._client.create_run(
            self._store.experiment_id,
            run_name=run_name(self._event.config),
            tags=tags(self._event, self._parent),
        )
        return str(created.info.run_id)

    def _found_or_new(self, known: set[str]) -> str:
        """A run that was not known is the one that was created before, though the answer was lost."""
        for run in self._unfinished():
            if run.info.run_id not in known:
                return str(run.info.run_id)
        return self._new()

    def _continue(self, points: Points, earlier: Run) -> None:
        mlflow_id = points.mlflow_id
        self._insist(partial(self._client.update_run, mlflow_id, status="RUNNING"))
        resumed = int(earlier.data.tags.get(TAG_RESUMED, "0")) + 1
        # MLflow refuses to change a parameter, so only missing ones are sent.
        missing = {k: v for k, v in parameters(self._event).items() if k not in earlier.data.params}
        self._insist(partial(points.look_up, self._client, list(earlier.data.metrics)))
        self._send(points, missing, {**tags(self._event, self._parent), TAG_RESUMED: str(resumed)})
        if TAG_ERROR in earlier.data.tags:
            self._insist(partial(self._client.delete_tag, mlflow_id, TAG_ERROR), partial(self._forget_error, mlflow_id))
        if earlier.inputs is None or not earlier.inputs.dataset_inputs:
            self._insist(partial(self._log_dataset, mlflow_id))

    def _send(self, points: Points, params: dict[str, str], new_tags: dict[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        as_params = [Param(key, value) for key, value in params.items()]
        as_tags = [RunTag(key, value) for key, value in new_tags.items()]
        self._insist(partial(points.send, self._client, as_params, as_tags))

    def _forget_error(self, mlflow_id: str) -> None:
        """Delete the tag if it is still there; MLflow refuses to delete what is not."""
        if TAG_ERROR in self._client.get_run(mlflow_id).data.tags:
            self._client.delete_tag(mlflow_id, TAG_ERROR)

    def _supersede(self, stale: Run, successor: str) -> None:
        """A run that starts anew leaves its interrupted predecessors behind: they will never continue."""
        self._insist(partial(self._client.set_tag, stale.info.run_id, TAG_SUPERSEDED, successor))
        if stale.info.status == "RUNNING":
            self._insist(partial(self._client.set_terminated, stale.info.run_id, "KILLED"))

    def _log_dataset(self, mlflow_id: str) -> None:
        from mlflow.exceptions import MlflowException

        inputs = [dataset_input(self._event.dataset)]
        try:
            self._client.log_inputs(mlflow_id, datasets=inputs)
        except MlflowException as error:
            if is_outage(error):
                raise
            # MLflow looks for the data set, then adds it; of processes that start at once only one succeeds in that.
            self._client.log_inputs(mlflow_id, datasets=inputs)
