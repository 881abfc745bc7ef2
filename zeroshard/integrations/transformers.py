"""The Trainer of transformers, and the trainers of TRL that derive from it, over an engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import TrainerState

from zeroshard.config.checked import show
from zeroshard.config.sections import Config, GivenConfig, Loader
from zeroshard.engine import Engine
from zeroshard.entry import initialize
from zeroshard.forwards.methods import held_unsharded
from zeroshard.integrations.data_parallel import TAG, parse_data_parallel

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the mixin stands before the Trainer among the bases of a class

_STATE = "trainer_state.json"
"""The file of a checkpoint that the Trainer writes last."""
_COMPUTE_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of forward and backward, by its name in `args.mixed_precision`."""
_ALSO_ARGUMENTS = (
    ("gradient_accumulation_steps", 1, "gradient_accumulation_steps"),
    ("clip_grad_norm", None, "max_grad_norm"),
    ("micro_batch_size", 1, "per_device_train_batch_size"),
)
"""Keys of the config with their defaults, and the TrainingArguments that mean the same."""


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
    _num_parameters = 0
    """Elements of the model without embeddings, before it is sharded."""

    def __init__(self, *args: Any, zeroshard_config: GivenConfig = None, **kwargs: Any) -> None:
        self.zeroshard_config = parse_data_parallel(zeroshard_config, "the Trainer")
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
            if hasattr(self.model, "num_parameters"):
                self._num_parameters = self.model.num_parameters(exclude_embeddings=True)
            self.engine = initialize(self.model, self.optimizer, self.zeroshard_config).engine
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
        with held_unsharded(self._sharded._runtime) if generates else nullcontext():
            return super().prediction_step(*args, **kwargs)

    def _backward(self, loss: Tensor, **kwargs: Any) -> None:
        self._sharded.backward(loss, scale_wrt_gas=False)  # the Trainer has divided the loss

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip all gradients of the model, whatever `parameters` are; return their norm.

        None if the Trainer only asks for the norm, and the backward has stepped: no gradient is left.
        """
        has_none = max_norm == float("inf") and self.zeroshard_config.offload.step_in_backward
        return None if has_none else self._sharded.clip_grad_norm_(max_norm, norm_type)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count 6 operations for each token and whole parameter, as a Trainer over a plain model does."""
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 0 if tokens is None else 6 * tokens.numel() * self._num_parameters

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
        """Check a checkpoint before training begins; `_load_optimizer_and_scheduler` loads all of it."""
        if not _is_complete(Path(resume_from_checkpoint)):
            raise ValueError(
                f"'{resume_from_checkpoint}': expected a complete checkpoint of a Trainer over zeroshard, "
                f"with '{_STATE}' and '{TAG}'. To begin with other weights, give their folder to "
                "from_pretrained() and train without resume_from_checkpoint"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        schedule = self._sharded.load_checkpoint(checkpoint, TAG)["lr_scheduler"]
        self.lr_scheduler.load_state_dict(schedule)

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
    return (folder / TAG).is_file()


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
            recomputes and config.recompute == "unit"
        ),
        f"offload.step_in_backward: expected max_grad_norm=0, got {args.max_grad_norm}; the norm of all "
        "gradients comes after its steps": config.offload.step_in_backward and args.max_grad_norm,
        "loader: expected the default; the Trainer makes the DataLoaders": config.loader != Loader(),
        "checkpoint.keep_last: expected None; set save_total_limit": config.checkpoint.keep_last is not None,
    }
    return (clause for clause, is_asked in clauses.items() if is_asked)


def _contradictions(config: Config, args: Any) -> Iterator[str]:
    """Yield a clause for each key that the config and the TrainingArguments set to different values."""
    keys = (
        ("precision.param_dtype", None, "bf16 or fp16", _COMPUTE_DTYPES.get(args.mixed_precision)),
        ("device", args.device.type, "the device", str(args.device)),
        *((key, default, name, getattr(args, name)) for key, default, name in _ALSO_ARGUMENTS),
    )
    for key, default, name, theirs in keys:
        own = attrgetter(key)(config)
        if own not in (None, default, theirs) and theirs is not None:
            yield f"{key}={show(own)}, but {name} is {show(theirs)}: set it in the TrainingArguments alone"
