"""The methods of an engine that save and load: checkpoints, and models in the format of transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zeroshard.checkpoint.capture import Progress, capture
from zeroshard.checkpoint.load import load
from zeroshard.config.rules import parse_dtype
from zeroshard.hf.adapters import export_adapters, has_adapters
from zeroshard.hf.export import MAX_SHARD_BYTES, Format, export_engine
from zeroshard.hf.live import export_merged, stream_parameters
from zeroshard.parameters.state import refuse_averages, refuse_in_batch

if TYPE_CHECKING:
    from zeroshard.engine import Engine


def save_checkpoint(
    engine: Engine,
    dir: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    blocking: bool = True,
    *,
    optimizer: bool = True,
) -> None:
    """Save all that training goes on from, for any number of ranks, stage and precision; collective.

    Args:
        dir: a folder that all ranks share. The checkpoint appears in it at once, when it is complete.
        tag: the name of the checkpoint; None: "step-<global_step>". An older one of that name is
            replaced.
        client_state: the user's values on rank 0: tensors, numbers, strings, lists and dicts of them.
            Some other kinds come back as these: numbers of NumPy as Python's, arrays as tensors, paths as
            strings, dataclasses as dicts, enums as their values, NamedTuples as tuples.
        blocking: True returns when the checkpoint is there, False when its values are copied. A thread
            then writes it beside further training. A failure is raised, on all ranks, by a later step,
            save or load; with sharded parameters also by a forward. With values on the nvme
            tier, which may not fit into memory, the call returns when the checkpoint is there.
        optimizer: False leaves out the states of the optimizer and of the LR scheduler.

    Raises:
        ValueError: a bad tag or path; a value that can't be saved, by its key; other places on
            other ranks.
        RuntimeError: the checkpoint could not be written; the call is in the middle of a step or a
            batch; a list of an asynchronous pipeline has failed; or the last save failed.
    """
    refuse_in_batch(engine._runtime.state, "save_checkpoint()")
    engine._halfway.check("save_checkpoint()")
    refuse_averages(engine._runtime.state, "save_checkpoint()")
    if engine._micro_step:
        raise RuntimeError(
            f"save_checkpoint() after {engine._micro_step} micro-batches of an unfinished step: a "
            "checkpoint does not save gradients. End the step with backward() and step(), or drop it "
            "with zero_grad()"
        )
    engine._saver.finish()
    tag = f"step-{engine.global_step}" if tag is None else tag
    parts = engine._parts if optimizer else replace(engine._parts, optimizer=None, lr_scheduler=None)
    snapshot = capture(parts, _progress(engine), dir, tag, client_state)
    is_blocking = blocking or engine._runtime.context.setting.tiers.has_files
    (engine._saver.save if is_blocking else engine._saver.start)(snapshot)


def load_checkpoint(
    engine: Engine,
    dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    restore_hyperparameters: bool = True,
    convert_states: bool = False,
    optimizer: bool = True,
) -> dict[str, Any]:
    """Go on from a checkpoint, whatever layout wrote it; collective. Gradients are dropped.

    Args:
        dir: the folder, or the directory of one checkpoint.
        tag: the tag of the checkpoint; None: the latest.
        restore_hyperparameters: False keeps the present learning rates, decays, ... and LR schedule.
        convert_states: accept states of another optimizer of the same family, or number of bits.
        optimizer: False loads the model alone: parameters, buffers and the extra states of modules.
            Optimizer, LR scheduler, counts of steps, generators and the place in the data stay.

    Returns:
        The `client_state` that was saved; {} if none was given.

    Raises:
        ValueError: there is no checkpoint, or it belongs to another model or optimizer; nothing has
            changed.
        RuntimeError: a file is missing or damaged; nothing has changed unless the message says so. Or the
            call is in the middle of a batch, or a list of an asynchronous pipeline has failed.
    """
    refuse_in_batch(engine._runtime.state, "load_checkpoint()")
    refuse_averages(engine._runtime.state, "load_checkpoint()")
    engine._saver.finish()
    with torch.inference_mode(False):  # tensors that are made here are trained
        loaded = load(
            engine._parts,
            dir,
            tag,
            _progress(engine),
            restore_hyperparameters=restore_hyperparameters,
            convert_states=convert_states,
            weights_only=not optimizer,
        )
    engine._halfway.end()
    if engine._early is not None:
        engine._early.end()
    engine.zero_grad()
    progress = loaded.progress
    engine.global_step, engine.skipped_steps = progress.global_step, progress.skipped_steps
    engine._guard.loss_scale = progress.loss_scale
    if engine._guard.rounding is not None and progress.rounding is not None:
        engine._guard.rounding.resume(progress.rounding)
    return loaded.client_state


def save_pretrained(
    engine: Engine,
    dir: str | os.PathLike[str],
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    merge_adapters: bool = False,
    dequantize: bool = False,
) -> None:
    """Write the model as transformers does, for its `from_pretrained`; collective.

    Rank 0 writes, and holds one unit at a time. For a model with adapters of peft it writes the adapters,
    for `PeftModel.from_pretrained`, or with `merge_adapters` the model that has taken them in.

    Args:
        dir: a folder of rank 0, made if it is not there. Weights in it are replaced.
        tokenizer: a tokenizer to save, too; or None.
        dtype: the dtype of floating-point parameters; None: the main dtype.
        max_shard_bytes: the most bytes of a file of weights.
        merge_adapters: write the whole model, with the active adapters merged into its weights. The
            adapters of the engine stay as they are.
        dequantize: write the weights that codes stand for, as `merge_adapters` does too. A model with
            codes is written whole in no other way.

    Raises:
        ValueError: an argument is not as expected; adapters that are computed from more than parameters,
            or that no weight can take in; codes without adapters.
        RuntimeError: rank 0 could not write; all ranks tell the reason.
    """
    how = Format(dtype=dtype, max_shard_bytes=max_shard_bytes, tokenizer=tokenizer)
    if dequantize and not merge_adapters and has_adapters(engine.module):
        raise ValueError(
            "save_pretrained(dequantize=True): the model has adapters, which are written alone: expected "
            "merge_adapters=True with it"
        )
    if merge_adapters or dequantize:
        export_merged(engine._runtime, dir, how, engine._parts.described)
    elif has_adapters(engine.module):
        export_adapters(engine._runtime, dir, how)
    else:
        export_engine(engine._runtime, dir, how, engine._parts.described)


def named_full_parameters(
    engine: Engine, dtype: torch.dtype | str | None = None, merge_adapters: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Stream the parameters, whole and on every rank: for an inference server, or the loop of an RL run.

    All ranks iterate together, to the end, and take no step meanwhile. A unit is gathered when its first
    parameter is asked for. The tensors of a unit share memory, which goes when the last of them is
    dropped: keep none of them, or a copy, to hold one unit at a time.

    Args:
        dtype: the dtype of floating-point tensors; None: the main dtype, or that of a frozen parameter.
            Quantized weights come as numbers, not as codes.
        merge_adapters: merge the active adapters of peft into the weights around them, and give these the
            names that they have without adapters. The adapters of the engine stay as they are.

    Returns:
        An iterator over names and tensors of the original shapes, on this rank's device, with tied
        parameters once. They come in the order of the units, those of the first pipeline part first, and
        parameters of `Config.ignored` last, with this rank's own values.

    Raises:
        ValueError: an unknown dtype; adapters that no weight can take in.
        RuntimeError: in a forward, a backward or `unsharded()`.
    """
    chosen = None if dtype is None else parse_dtype(dtype)
    return stream_parameters(engine._runtime, chosen, merge_adapters=merge_adapters)


def _progress(engine: Engine) -> Progress:
    return Progress(
        global_step=engine.global_step,
        skipped_steps=engine.skipped_steps,
        loss_scale=engine._guard.loss_scale,
        rounding=engine._guard.rounding,
    )
