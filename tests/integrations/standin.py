"""Stands for Ray in tests without it."""

import sys
import types


class LocalFileSystem:
    """Stands for pyarrow's filesystem of this machine."""


class Run:
    """The calls of ray.train in a worker, and what the run keeps between them."""

    def __init__(self, folder, filesystem):
        self.storage_filesystem, self.experiment_fs_path = filesystem, str(folder)
        self.reported = []

    def get_context(self):
        return types.SimpleNamespace(get_storage=lambda: self)

    def report(self, metrics, checkpoint, checkpoint_upload_mode):
        self.reported.append((metrics, checkpoint.path, checkpoint_upload_mode))
        self.newest = checkpoint

    def get_checkpoint(self):
        return getattr(self, "newest", None)


def stand_in(patch, folder, filesystem=None):
    """Put a run in the place of Ray; return it with the module under test."""
    run = Run(folder, filesystem or LocalFileSystem())
    train = types.ModuleType("ray.train")
    train.Checkpoint = lambda path, filesystem: types.SimpleNamespace(path=path, filesystem=filesystem)
    train.CheckpointUploadMode = types.SimpleNamespace(NO_UPLOAD="no upload")
    train.get_context, train.report, train.get_checkpoint = run.get_context, run.report, run.get_checkpoint
    ray = types.ModuleType("ray")
    ray.train = train
    fs = types.ModuleType("pyarrow.fs")
    fs.LocalFileSystem = LocalFileSystem
    for name, module in (("ray", ray), ("ray.train", train), ("pyarrow.fs", fs)):
        patch.setitem(sys.modules, name, module)
    patch.delitem(sys.modules, "zeroshard.integrations.ray", raising=False)
    import zeroshard.integrations.ray as module

    patch.delitem(sys.modules, "zeroshard.integrations.ray")
    return run, module
