"""The TrainingArguments of transformers and a Config, made one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from zeroshard.config.checked import show
from zeroshard.config.sections import Config, Loader

_COMPUTE_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of forward and backward, by its name in `args.mixed_precision`."""


def join_arguments(config: Config, args: Any) -> Config:
    """Return the config of an engine that a Trainer drives.

    Mixed precision, accumulation, clipping, the micro-batch size and the device come from the
    TrainingArguments. The config leaves them at their defaults or repeats them.

    Args:
        config: the settings that TrainingArguments do not have: stage, units, reduce_dtype, ...
        args: the TrainingArguments.

    Raises:
        ValueError: the two contradict each other, or `args` ask for something that an engine cannot do. The
            message lists all of it.
    """
    problems = [*_impossible(config, args), *_contradictions(config, args)]
    if problems:
        raise ValueError("a Trainer over zeroshard: " + "; ".join(problems))
    dtype = _COMPUTE_DTYPES[args.mixed_precision] or config.precision.param_dtype
    return replace(
        config,
        precision=replace(config.precision, param_dtype=dtype),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        micro_batch_size=args.per_device_train_batch_size,
        clip_grad_norm=None,  # the Trainer has the engine clip before it calls on_pre_optimizer_step
        device=str(args.device),
    )


def _impossible(config: Config, args: Any) -> Iterator[str]:
    """Yield a clause for each setting that does not work."""
    recomputes = any(getattr(args, f"{what}_checkpointing", False) for what in ("activation", "gradient"))
    clauses = {
        "deepspeed: expected None; Config.from_deepspeed reads such a config": args.deepspeed,
        "fsdp: expected none; zeroshard shards the model": args.fsdp,
        f"mixed_precision={args.mixed_precision!r}: expected bf16, fp16 or none": args.mixed_precision
        not in _COMPUTE_DTYPES,
        "fp16_full_eval, bf16_full_eval: expected False; evaluation has the dtype of training": (
            args.fp16_full_eval or args.bf16_full_eval
        ),
        "torch_compile: expected False; Config(compile=True) compiles units": args.torch_compile,
        "auto_find_batch_size: expected False; a rank cannot try again alone": args.auto_find_batch_size,
        "save_on_each_node: expected False; all ranks share output_dir": args.save_on_each_node,
        "load_best_model_at_end needs checkpoints: expected save_only_model=False": (
            args.save_only_model and args.load_best_model_at_end
        ),
        "accelerator_config.even_batches: expected True; every rank needs as many batches": (
            not args.accelerator_config.even_batches
        ),
        "parallelism_config: expected None": getattr(args, "parallelism_config", None) is not None,
        f"{args.n_gpu} GPUs in one process: expected one, started by torchrun": args.n_gpu > 1,
        "recompute='unit' and gradient checkpointing of the Trainer: expected one of them": (
            recomputes and config.recompute != "none"
        ),
        f"offload.step_in_backward: expected max_grad_norm=0, got {args.max_grad_norm}; the norm of all "
        "gradients comes after its steps": config.offload.step_in_backward and args.max_grad_norm,
        "loader: expected the default; the Trainer makes the DataLoaders": config.loader != Loader(),
        "checkpoint.keep_last: expected None; set save_total_limit": config.checkpoint.keep_last is not None,
    }
    return (clause for clause, is_asked in clauses.items() if is_asked)


def _contradictions(config: Config, args: Any) -> Iterator[str]:
    """Yield a clause for each key that the config and the TrainingArguments set to different values."""
    mixed = _COMPUTE_DTYPES.get(args.mixed_precision)
    keys = (
        ("precision.param_dtype", config.precision.param_dtype, None, "bf16 or fp16", mixed),
        (
            "gradient_accumulation_steps",
            config.gradient_accumulation_steps,
            1,
            "gradient_accumulation_steps",
            args.gradient_accumulation_steps,
        ),
        ("clip_grad_norm", config.clip_grad_norm, None, "max_grad_norm", args.max_grad_norm),
        (
            "micro_batch_size",
            config.micro_batch_size,
            1,
            "per_device_train_batch_size",
            args.per_device_train_batch_size,
        ),
        ("device", config.device, args.device.type, "the device", str(args.device)),
    )
    for key, own, default, name, theirs in keys:
        if own not in (None, default, theirs) and theirs is not None:
            yield f"{key}={show(own)}, but {name} is {show(theirs)}: set it in the TrainingArguments alone"
