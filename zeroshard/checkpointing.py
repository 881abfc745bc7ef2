"""The part of an engine that saves and loads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.capture import EngineState, Progress, capture
from zeroshard.checkpoint.load import load
from zeroshard.checkpoint.save import Saver
from zeroshard.comm.collectives import on_all
from zeroshard.config.checked import parse_dtype
from zeroshard.hf.adapters import export_adapters, has_adapters
from zeroshard.hf.export import MAX_SHARD_BYTES, Format, export_engine
from zeroshard.hf.live import export_merged, stream_parameters
from zeroshard.parameters.state import refuse_averages, refuse_in_batch
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.averages import Averages
from zeroshard.stepping.early import EarlySteps
from zeroshard.stepping.guard import InterruptedStep, StepGuard


class Checkpointing:
    """Checkpoints, and models in the format of transformers."""

    module: nn.Module
    global_step: int
    skipped_steps: int
    _runtime: Runtime
    _guard: StepGuard
    _parts: EngineState
    _saver: Saver
    _early: EarlySteps | None
    _halfway: InterruptedStep
    _micro_step: int

    if TYPE_CHECKING:

        def zero_grad(self, set_to_none: bool = True) -> None: ...

    def save_checkpoint(
        self,
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
        refuse_in_batch(self._runtime.state, "save_checkpoint()")
        self._halfway.check("save_checkpoint()")
        refuse_averages(self._runtime.state, "save_checkpoint()")
        if self._micro_step:
            raise RuntimeError(
                f"save_checkpoint() after {self._micro_step} micro-batches of an unfinished step: a "
                "checkpoint does not save gradients. End the step with backward() and step(), or drop it "
                "with zero_grad()"
            )
        self._saver.finish()
        tag = f"step-{self.global_step}" if tag is None else tag
        parts = self._parts if optimizer else replace(self._parts, optimizer=None, lr_scheduler=None)
        snapshot = capture(parts, self._progress, dir, tag, client_state)
        is_blocking = blocking or self._runtime.context.setting.tiers.has_files
        (self._saver.save if is_blocking else self._saver.start)(snapshot)

    def load_checkpoint(
        self,
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
        refuse_in_batch(self._runtime.state, "load_checkpoint()")
        refuse_averages(self._runtime.state, "load_checkpoint()")
        self._saver.finish()
        with torch.inference_mode(False):  # tensors that are made here are trained
            loaded = load(
                self._parts,
                dir,
                tag,
                self._progress,
                restore_hyperparameters=restore_hyperparameters,
                convert_states=convert_states,
                weights_only=not optimizer,
            )
        self._halfway.end()
        if self._early is not None:
            self._early.end()
        self.zero_grad()
        progress = loaded.progress
        self.global_step, self.skipped_steps = progress.global_step, progress.skipped_steps
        self._guard.loss_scale = progress.loss_scale
        if self._guard.rounding is not None and progress.rounding is not None:
            self._guard.rounding.resume(progress.rounding)
        return loaded.client_state

    def save_pretrained(
        self,
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
        if dequantize and not merge_adapters and has_adapters(self.module):
            raise ValueError(
                "save_pretrained(dequantize=True): the model has adapters, which are written alone: expected "
                "merge_adapters=True with it"
            )
        if merge_adapters or dequantize:
            export_merged(self._runtime, dir, how, self._parts.described)
        elif has_adapters(self.module):
            export_adapters(self._runtime, dir, how)
        else:
            export_engine(self._runtime, dir, how, self._parts.described)

    def named_full_parameters(
        self, dtype: torch.dtype | str | None = None, merge_adapters: bool = False
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
        return stream_parameters(self._runtime, chosen, merge_adapters=merge_adapters)

    def add_averages(self, name: str, decay: float) -> Averages:
        """Keep moving averages of the trained parameters from now on; collective. `zeroshard.EMA` calls it.

        Raises:
            ValueError, RuntimeError: as `zeroshard.EMA` has them.
        """
        runtime, kept = self._runtime, self._parts.averages

        def make() -> tuple[str, float]:
            if not str(name).isidentifier():
                raise ValueError(f"EMA: expected a name like 'ema' or 'ema_2', got {name!r}")
            if name in kept:
                raise ValueError(
                    f"EMA: the engine has an average '{name}' already: give this one another name"
                )
            runtime.settle()
            runtime.require_slices("EMA()")
            refuse_averages(runtime.state, "EMA()")
            made.append(Averages(runtime, decay))
            return name, made[0].decay

        made: list[Averages] = []
        everyone = on_all(runtime.context.axes.world, "agreement on an EMA", make)
        for rank, own in enumerate(everyone):
            if own != everyone[0]:
                raise ValueError(
                    f"EMA: rank 0 has name and decay {everyone[0]}, rank {rank} has {own}: expected the same "
                    "on every rank"
                )
        kept[name] = made[0]
        return made[0]

    @property
    def _progress(self) -> Progress:
        return Progress(
            global_step=self.global_step,
            skipped_steps=self.skipped_steps,
            loss_scale=self._guard.loss_scale,
            rounding=self._guard.rounding,
        )
