"""Train the small Llama with Ray Train's TorchTrainer, with checkpoints that any number of workers loads.

    pip install "ray[train]"
    python examples/train_ray.py --workers 2                            # on this machine
    python examples/train_ray.py --workers 16 --gpu --storage /shared   # on the cluster of RAY_ADDRESS

Ray starts the workers, and starts them again after a failure. `--fail-at N` lets worker 0 fail once, before
step N. The storage is a folder that all workers mount. A run with the storage of an earlier one goes on from
its newest checkpoint.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer

import zeroshard
from blocks import collator
from llama import parser, read_text, small_llama

EXAMPLES = Path(__file__).resolve().parent


def train(config: dict[str, Any]) -> None:
    """Train on this worker, whose process group Ray has started."""
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, _, loader, _ = zeroshard.initialize(
        model,
        optimizer,
        {"stage": config["stage"], "clip_grad_norm": 1.0, "micro_batch_size": 4},
        training_data=read_text().train,
        collate_fn=collator(model),
    )
    assert loader is not None  # there is training data
    if checkpoint := ray.train.get_checkpoint():  # the newest one of the run
        engine.load_checkpoint(checkpoint.path)
    first = engine.global_step
    context = ray.train.get_context()
    while engine.global_step < config["steps"]:
        for batch in loader:
            step = engine.global_step
            if step >= config["steps"]:
                break
            if step == config["fail_at"] and first == 0 and context.get_world_rank() == 0:
                os._exit(1)  # as a machine that goes down
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            if step % 10 == 0 or engine.global_step == config["steps"]:
                folder = f"{config['folder']}/checkpoint-step-{engine.global_step}"
                engine.save_checkpoint(folder)  # the workers write it themselves: Ray copies nothing
                ray.train.report(
                    {"step": step, "loss": loss.item(), "first": first},
                    Checkpoint(folder),
                    checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
                )


def main() -> None:
    options = parser(__doc__, steps=61)
    options.add_argument("--workers", type=int, default=2, metavar="N", help="(%(default)s)")
    options.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    options.add_argument("--storage", metavar="DIR", help="a folder that all workers mount")
    options.add_argument("--fail-at", type=int, metavar="N", help="let worker 0 fail once")
    args = options.parse_args()
    storage = args.storage or tempfile.mkdtemp()
    if not os.path.isabs(storage):
        options.error(f"--storage: expected the absolute path of a folder, got '{storage}'")
    path = os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}}, log_to_driver=True)
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "steps": args.steps,
            "stage": args.stage,
            "fail_at": args.fail_at,
            "folder": f"{storage}/zeroshard",  # of the run, see its name below
        },
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(
            name="zeroshard",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print(f"last: {result.metrics}")
    print(f"checkpoint: {result.checkpoint.path if result.checkpoint else 'none'}")
    ray.shutdown()


if __name__ == "__main__":
    main()
