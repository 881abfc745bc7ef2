"""The Trainer of transformers, and the trainers of TRL that derive from it, over an engine."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import TrainerState

from zeroshard.checkpoint import rng
from zeroshard.config.sections import Config, GivenConfig
from zeroshard.engine import Engine
from zeroshard.entry import initialize
from zeroshard.integrations.data_parallel import TAG, parse_data_parallel, refuse
from zeroshard.outer import OuterStep

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the mixin stands before the Trainer among the bases of a class

_STATE = "trainer_state.json"
"""The file of a checkpoint that the Trainer writes last."""
_COMPUTE_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of forward and backward, by its name in `args.mixed_precision`."""
_DECIDED = {
    "gradient_accumulation_steps": "it in the TrainingArguments",
    "clip_grad_norm": "max_grad_norm of the TrainingArguments",
    "micro_batch_size": "per_device_train_batch_size of the TrainingArguments",
    "device": "use_cpu of the TrainingArguments",
    "loader": "dataloader_num_workers and the like of the TrainingArguments",
    "checkpoint.keep_last": "save_total_limit of the TrainingArguments",
}
"""Keys of the config, with the TrainingArguments that decide of them."""


class ZeroShardMixin(_Trainer):
    """Makes a Trainer shard its model: `class ZeroShardTrainer(ZeroShardMixin, Trainer)`.

    The model is sharded when training or evaluation begins. Then `trainer.engine` is the engine, and all
    ranks call `train`, `evaluate`, `predict` and `save_model` alike. `trainer.engine.close()` makes
    `trainer.model` an ordinary module again.

    Checkpoints of the Trainer hold one of the engine, which loads at any number of ranks and stage. A step
    zeroes its gradients, so the callback `on_optimizer_step` finds none.

    Args:
        zeroshard_config: a Config, a dict, or a path to a .json or .toml file. Mixed precision, accumulation,
            clipping and the micro-batch size are taken from the TrainingArguments.
        gradient_hook, outer_step: as `initialize` takes them.
        args, kwargs: the arguments of the Trainer.

    Raises:
        ValueError: the TrainingArguments and the config contradict each other, or ask for something that an
            engine cannot do.
    """

    engine: Engine | None = None
    """The engine over the model; None until training or evaluation begins."""
    zeroshard_config: Config
    """The config of the engine, joined with the TrainingArguments."""
    args: Any
    model: Any
    lr_scheduler: Any
    state: Any

    def __init__(
        self,
        *args: Any,
        zeroshard_config: GivenConfig = None,
        gradient_hook: tuple[Any, Any] | None = None,
        outer_step: OuterStep | None = None,
        **kwargs: Any,
    ) -> None:
        self.zeroshard_config = parse_data_parallel(zeroshard_config, "the Trainer", _DECIDED)
        self._options: dict[str, Any] = {"gradient_hook": gradient_hook, "outer_step": outer_step}
        super().__init__(*args, **kwargs)

    # -- the Trainer's calls become the engine's --------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator, whose backward and clipping are the engine's from now on."""
        self.zeroshard_config = join_arguments(self.zeroshard_config, self.args)
        mixed_precision, self.args.mixed_precision = self.args.mixed_precision, "no"
        try:
            super().create_accelerator_and_postprocess()
        finally:
            self.args.mixed_precision = mixed_precision
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "a Trainer over zeroshard: accelerate's config asks for DeepSpeed or FSDP: use torchrun"
            )
        accelerator: Any = self.accelerator
        accelerator.backward, accelerator.clip_grad_norm_ = self._backward, self._clip
        accelerator.no_sync = lambda model: nullcontext()  # the engine knows of micro-batches to come
        unwrap = accelerator.unwrap_model
        accelerator.unwrap_model = lambda model, *args, **kwargs: unwrap(
            model.module if isinstance(model, Engine) else model, *args, **kwargs
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: `initialize` moves this rank's part of it."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Engine:
        return self._sharded

    @property
    def _sharded(self) -> Engine:
        """The engine over the present model, made when it is first asked for."""
        if self.engine is None or self.engine.module is not self.model:
            if self.engine is not None:
                self.engine.close(restore=False)  # its model has been replaced by model_init
            self.create_optimizer()
            config, options = self.zeroshard_config, self._options
            self.engine = initialize(self.model, self.optimizer, config, **options).engine
            self.model_wrapped, self.optimizer = self.engine, _EngineStep(self.engine)
            if self.engine.world_size != self.accelerator.num_processes:
                raise RuntimeError(
                    f"zeroshard has {self.engine.world_size} ranks, but accelerate divides the data among "
                    f"{self.accelerator.num_processes} processes: start them with torchrun, and make the "
                    "TrainingArguments in them"
                )
        return self.engine

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of a micro-batch; the Trainer takes the step after the last one."""
        is_last = bool(self.accelerator.sync_gradients)
        self._sharded.set_gradient_accumulation_boundary(is_last)
        loss = super().training_step(*args, **kwargs)
        if not is_last:
            self._sharded.step()  # counts the micro-batch
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of a batch; a Seq2SeqTrainer generates them with all parameters gathered."""
        generates = getattr(self.args, "predict_with_generate", False)
        with self._sharded.gathered() if generates else nullcontext():
            return super().prediction_step(*args, **kwargs)

    def _backward(self, loss: Tensor, **kwargs: Any) -> None:
        self._sharded.backward(loss, scale_wrt_gas=False)  # the Trainer has divided the loss

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip all gradients of the model, whatever `parameters` are; return their norm.

        None if the Trainer only asks for the norm, and there may be none: the backward has stepped, and no
        gradient is left, or a hook may leave ranks with different gradients.
        """
        has_hook = self._options["gradient_hook"] or hasattr(self._sharded.optimizer, "hook_over")
        if max_norm == float("inf") and (has_hook or self.zeroshard_config.offload.step_in_backward):
            return None
        return self._sharded.clip_grad_norm_(max_norm, norm_type)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count none: a rank's slices do not show the number of parameters."""
        return 0

    # -- checkpoints ------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder for `from_pretrained`; called on all ranks."""
        output_dir = self.args.output_dir if output_dir is None else output_dir
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        self._sharded.save_pretrained(output_dir, tokenizer)
        if self.args.should_save:
            torch.save(self.args, Path(output_dir, "training_args.bin"))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._sharded.zero_grad()  # a callback may have ended training in the middle of a step
        schedule = {} if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        self._sharded.save_checkpoint(output_dir, TAG, {"lr_scheduler": schedule})

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # the last file of a checkpoint comes after all ranks' files

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train. With `resume_from_checkpoint=True`, go on from the last checkpoint that is complete.

        Raises:
            ValueError: there is no checkpoint, or the named checkpoint was not saved by a Trainer like this.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_complete(Path(self.args.output_dir)) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: `_load_optimizer_and_scheduler` loads all of a checkpoint."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        engine, device = self._sharded, self.args.device
        generators = rng.capture(device)
        self.lr_scheduler.load_state_dict(engine.load_checkpoint(checkpoint, TAG)["lr_scheduler"])
        rng.restore(generators, device)  # the Trainer restores them after samplers have drawn the epoch anew

    def _load_best_model(self) -> None:
        self._sharded.load_checkpoint(self.state.best_model_checkpoint, TAG, optimizer=False)


class _EngineStep(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer of an engine for the Trainer: its step is the engine's."""

    _is_accelerate_prepared = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self._engine = engine

    def step(self, closure: Any = None) -> None:
        """Step, unless gradients are not finite and `nonfinite` or float16 leaves the step out."""
        self._is_overflow = not self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad(set_to_none)


def _is_complete(folder: Path) -> bool:
    """True for a checkpoint whose last file has been written."""
    try:
        TrainerState.load_from_json(str(folder / _STATE))
    except (OSError, ValueError, TypeError):
        return False
    return any(folder.glob(f"**/{TAG}"))  # of replicas, each in a folder


def _last_complete(folder: Path) -> str | None:
    """The newest complete checkpoint of a Trainer in a folder; None if there is none."""
    found = {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and _is_complete(path)
    }
    return str(found[max(found)]) if found else None


def join_arguments(config: Config, args: Any) -> Config:
    """Return the config of an engine that a Trainer drives.

    Mixed precision, accumulation, the micro-batch size and the device come from the TrainingArguments.

    Args:
        config: the settings that TrainingArguments do not have: stage, units, reduce_dtype, ...
        args: the TrainingArguments.

    Raises:
        ValueError: the two contradict each other, or `args` ask for something that an engine cannot do. The
            message lists all of it.
    """
    own, theirs = config.precision.param_dtype, _COMPUTE_DTYPES.get(args.mixed_precision)
    recomputes = any(getattr(args, f"{what}_checkpointing", False) for what in ("activation", "gradient"))
    is_spoilt = args.save_only_model and args.load_best_model_at_end
    clips = args.max_grad_norm or 0 if config.offload.step_in_backward else 0
    refuse(
        "a Trainer over zeroshard",
        ("precision.param_dtype", own, theirs if own and theirs else own, "set bf16 or fp16 alone"),
        ("mixed_precision", args.mixed_precision in _COMPUTE_DTYPES, True, "set bf16, fp16 or none"),
        ("deepspeed", args.deepspeed, None, "Config.from_deepspeed reads such a config"),
        ("fsdp", bool(args.fsdp), False, "zeroshard shards the model"),
        ("parallelism_config", getattr(args, "parallelism_config", None), None, "ranks are data-parallel"),
        ("GPUs of this process", max(args.n_gpu, 1), 1, "start a process for each with torchrun"),
        ("fp16_full_eval", args.fp16_full_eval, False, "evaluation has the dtype of training"),
        ("bf16_full_eval", args.bf16_full_eval, False, "evaluation has the dtype of training"),
        ("torch_compile", args.torch_compile, False, "Config(compile=True) compiles units"),
        ("auto_find_batch_size", args.auto_find_batch_size, False, "a rank cannot try again alone"),
        ("save_on_each_node", args.save_on_each_node, False, "all ranks share output_dir"),
        ("save_only_model", is_spoilt, False, "load_best_model_at_end needs whole checkpoints"),
        ("even_batches", args.accelerator_config.even_batches, True, "every rank needs as many batches"),
        ("recompute", config.recompute if recomputes else "none", "none", "the Trainer recomputes already"),
        ("max_grad_norm", clips, 0, "the norm of all gradients comes after the steps of step_in_backward"),
    )
    return replace(
        config,
        precision=replace(config.precision, param_dtype=theirs or own),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        micro_batch_size=args.per_device_train_batch_size,
        clip_grad_norm=None,  # the Trainer has the engine clip before it calls on_pre_optimizer_step
        device=str(args.device),
    )
