"""Ray Train's TorchTrainer: a worker reports metrics with a checkpoint of its engine, and goes on from one.

Ray starts the workers and their process group, in which `zeroshard.initialize` works as it is. In the
function of a worker:

    engine = zeroshard.initialize(model, optimizer, config).engine
    resume(engine)                                    # after a failure, and with a run that is restored
    ...
    report(engine, {"loss": loss}, client_state={...})  # on all workers
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
from pyarrow.fs import LocalFileSystem
from ray.train import Checkpoint, CheckpointUploadMode

from zeroshard.engine import Engine
from zeroshard.integrations.data_parallel import TAG


def report(engine: Engine, metrics: dict[str, Any], client_state: Mapping[str, Any] | None = None) -> None:
    """Save the engine into the storage of the run, and report this to Ray with metrics; on all workers.

    The workers write into the storage themselves: Ray copies nothing. It keeps as many checkpoints as the
    CheckpointConfig of the run says. To report metrics alone, call `ray.train.report`.

    Args:
        engine: the engine of this worker, not in the middle of a step.
        metrics: numbers and strings. Ray takes the metrics of rank 0.
        client_state: values of rank 0 for the checkpoint, as for `Engine.save_checkpoint`.

    Raises:
        ValueError: the storage is none that workers mount; a value cannot be saved.
        RuntimeError: the checkpoint could not be written.
    """
    storage = ray.train.get_context().get_storage()
    filesystem = _local(storage.storage_filesystem, storage.experiment_fs_path)
    folder = Path(storage.experiment_fs_path, f"checkpoint-step-{engine.global_step}")
    engine.save_checkpoint(folder, TAG, client_state)
    ray.train.report(
        metrics, Checkpoint(str(folder), filesystem), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
    )


def resume(engine: Engine) -> dict[str, Any] | None:
    """Go on from the newest checkpoint of the run, at any number of workers and stage; on all workers.

    Returns:
        The `client_state` of `report`; None where the run has no checkpoint.

    Raises:
        ValueError: the checkpoint was not saved by `report`, or is of another model.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    _local(checkpoint.filesystem, checkpoint.path)
    return engine.load_checkpoint(checkpoint.path, TAG)


def _local(filesystem: Any, path: str) -> Any:
    """Return a filesystem that is a folder of this machine.

    Raises:
        ValueError: it is another filesystem, such as S3.
    """
    if not isinstance(filesystem, LocalFileSystem):
        raise ValueError(
            "storage_path of the RunConfig: expected a folder that all workers mount, since each writes its "
            f"part of a checkpoint into it, got '{path}' in a {type(filesystem).__name__}"
        )
    return filesystem
