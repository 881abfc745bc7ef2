"""A run of MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from zeroshard.logs.targets import RunFacts, flat

_MOST_PARAMS, _LONGEST_VALUE = 100, 500
"""The parameters of one call, and the characters of a value; MLflow's servers refuse more (its REST API)."""


class MLflow:
    """Sends metrics to a new run of MLflow, through a client of its own: the active run stays the user's.

    The experiment is that of `MLFLOW_EXPERIMENT_NAME`, or "zeroshard".

    Args:
        uri: the tracking URI, such as sqlite:///mlflow.db or the address of a server; "" for MLflow's own
            choice (`MLFLOW_TRACKING_URI`). MLflow 3.17 takes file:./mlruns only with
            MLFLOW_ALLOW_FILE_STORE=true.
        run: the run; its config becomes parameters.
    """

    def __init__(self, uri: str, run: RunFacts) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=uri or None)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "zeroshard")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._run_id: str = self._client.create_run(number).info.run_id
        self._send_params(flat(run.config))

    def _send_params(self, values: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:_LONGEST_VALUE]) for name, value in values.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values in one call."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        sent = [Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=sent)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def open_target(place: str, run: RunFacts) -> MLflow:
    """Return the target at the tracking URI `place`."""
    return MLflow(place, run)
