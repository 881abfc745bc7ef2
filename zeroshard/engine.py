"""The interface of a training loop: a module to call, a backward, a step."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from zeroshard.batches import Batches
from zeroshard.byname import ByName
from zeroshard.checkpoint.capture import EngineState
from zeroshard.checkpoint.save import Saver
from zeroshard.checkpointing import Checkpointing
from zeroshard.comm import streams
from zeroshard.comm.mesh import Axes
from zeroshard.comm.wrappers import refuse_wrappers
from zeroshard.data.losses import LossFunction, check_loss
from zeroshard.deepspeed.habits import DeepSpeedNames
from zeroshard.forwards.methods import EnginesOwn, as_forward, held_unsharded, register_method_of_part
from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.nested import cast_inputs
from zeroshard.internals.warn import warn_user
from zeroshard.modulelike import ModuleLike
from zeroshard.optim.asynchronous import chosen_by
from zeroshard.parallel.pipeline.part import ModelPart
from zeroshard.parallel.pipeline.training import PipelineTraining
from zeroshard.parameters.state import refuse_averages, refuse_to_drop
from zeroshard.reports import Reports
from zeroshard.sharded import ShardedCalls
from zeroshard.sharding.tracers import refuse_tracers, refuse_transforms
from zeroshard.stepping.attach import StepHooks, attach
from zeroshard.stepping.early import EarlySteps
from zeroshard.stepping.guard import Arguments, InterruptedStep, StepGuard


class Engine(ByName, Batches, Checkpointing, Reports, ShardedCalls, DeepSpeedNames, ModuleLike):
    """A sharded model with its optimizer. `zeroshard.initialize` makes it.

    Its parameters and buffers are those of the model, under their original names. Between steps the
    parameters are this rank's 1-D slices.
    """

    module: nn.Module
    """The model that was given."""

    def __init__(
        self,
        module: nn.Module,
        parts: EngineState,
        axes: Axes,
        saver: Saver,
        loss_fn: LossFunction | None,
        part: ModelPart | None = None,
    ) -> None:
        super().__init__()
        self._stand_for(module)
        self.config, self.optimizer, self.lr_scheduler = parts.config, parts.optimizer, parts.lr_scheduler
        self.loss_fn = loss_fn
        self._parts, self._runtime, self._axes, self._saver = parts, parts.runtime, axes, saver
        self.global_step = 0
        """Steps that the optimizer has taken."""
        self.skipped_steps = 0
        """Steps that were not taken because gradients were not finite."""
        self._guard = StepGuard(parts.runtime, parts.config, parts.optimizer)
        self._part = part
        self._pipeline = None if part is None else self._pipelined(part, parts)
        self._halfway = InterruptedStep()
        self._early: EarlySteps | None = None
        self._micro_step, self._num_micro_batches = 0, parts.config.gradient_accumulation_steps
        self._has_warned, self._num_dropped = False, 0
        """Micro-batches of unfinished steps that zero_grad() has dropped since the last step."""
        self._boundary: bool | None = None
        """True or False if the next `step()` is said to step, or not to; None: micro-batches are counted."""
        self._is_frozen_part = part is not None and part.is_frozen
        if part is not None:
            self._num_micro_batches = parts.config.pipeline.num_microbatches
        self._is_ready = False
        """True if `step()` has made the gradients ready for the optimizer."""
        weakref.finalize(self, saver.leave_alone)
        if parts.optimizer is not None:
            judge, count = self._judge_step, self._count_step
            own = StepHooks(weakref.WeakMethod(judge), weakref.WeakMethod(count), self._guard.scaling)
            steps = attach(parts.runtime, self._guard.rounding, parts.optimizer, engine=own)
            if parts.config.offload.step_in_backward:
                self._early = EarlySteps(parts.runtime, parts.optimizer, steps, self._halfway)
        refuse_wrappers([self], object.__setattr__)
        parts.runtime.changes.set(module, "zero_grad", EnginesOwn(self, module, "zero_grad"))

    def _pipelined(self, part: ModelPart, parts: EngineState) -> PipelineTraining:
        trained = [buffer for buffer in parts.runtime.buffers if buffer.trainable]
        chosen = chosen_by(parts.config.pipeline, parts.optimizer, trained)
        return PipelineTraining(part, parts.runtime, self.loss_fn, parts.optimizer, *chosen)

    @property
    def dp_rank(self) -> int:
        """The number of this rank among the `dp_world_size` ranks with data of their own."""
        return self._axes.dp.rank

    # -- training -------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward."""
        refuse_tracers(args)
        refuse_transforms()
        if self._runtime.context.setting.placements.frees_parameters or self._axes.dp.size == 1:
            self._saver.check(self._axes.world)  # elsewhere the ranks may call forward unevenly
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self._runtime.passes.abandon_forward()
            raise

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool = True) -> Tensor:
        """Compute gradients of `loss` / `gradient_accumulation_steps`, averaged over the ranks.

        In float16 the loss is multiplied by `loss_scale` and the gradients are divided by it again: `p.grad`
        is unscaled, and holds inf or nan where float16 overflowed.

        Args:
            loss: 0-dim, this rank's mean over its micro-batch.
            scale_wrt_gas: False leaves out the division, for a loss that its caller has divided already.

        Returns:
            The loss as it was given, detached: for sums that are to be logged.

        Raises:
            ValueError: `loss` is not a loss of one element that requires a gradient.
        """
        self._refuse_parts("backward()")
        check_loss(loss)
        reducer, more = self._runtime.reducer, not self._is_at_boundary
        send = not self._runtime.context.setting.placements.accumulates_locally
        factored = loss * self.loss_scale if reducer.is_half else loss
        if scale_wrt_gas and self._num_micro_batches > 1:
            factored = factored / self._num_micro_batches
        early = nullcontext() if self._early is None or more else self._early
        with reducer.deferring(more, send=send), reducer.scaled(self.loss_scale), early:
            factored.backward()
        self._guard.loss = loss.detach()
        return self._guard.loss

    def _refuse_parts(self, call: str) -> None:
        refuse_averages(self._runtime.state, call)
        if self._pipeline is not None and not self._pipeline.is_stepping:
            raise RuntimeError(
                f"{call} with mesh.pp={self._axes.pp.size}: each rank has a part of the model, and "
                "engine.train_batch(inputs, targets) takes a whole step"
            )

    def step(self) -> bool:
        """Count a micro-batch; at the accumulation boundary clip, step, and zero the gradients.

        If gradients are not finite on any rank, in float16 or with `nonfinite="skip"`, all ranks leave out
        the steps of optimizer and LR scheduler. Without any gradient they do so too, with a warning.

        Returns:
            True if parameters changed.

        Raises:
            RuntimeError: the engine has no optimizer. Or gradients are not finite, with
                `nonfinite="error"`; then parameters and gradients are as they were.
        """
        self._refuse_parts("step()")
        if self.optimizer is None and not self._is_frozen_part:
            raise RuntimeError("step() needs an optimizer: give one to zeroshard.initialize")
        self._saver.check(self._axes.world)
        if not self._is_at_boundary:
            self._micro_step += 1
            return False
        self._runtime.before_step()
        if self._early is not None:
            self._early.check()
        is_early = self._early is not None and self._early.end()
        # A pipeline rank may have no trained parameters, and takes part in the agreements all the same.
        if self._pipeline is None:
            if not self._runtime.has_gradients and not is_early:
                warn_user(
                    "engine.step() without a gradient: no backward has reached a parameter since the last "
                    "step or zero_grad(), so no step was taken. Call engine.backward(loss) before it, with a "
                    "loss that depends on trained parameters"
                )
                self._micro_step = 0
                self.zero_grad()
                return False
            if self._guard.loss is None and self._num_micro_batches > 1:
                self._warn_once(
                    "gradients of loss.backward() are not divided by gradient_accumulation_steps="
                    f"{self._num_micro_batches}: call engine.backward(loss), with scale_wrt_gas=False if the "
                    "loss is divided already"
                )
        is_taken = self._guard.make_ready()
        if is_taken:
            self._optimize(nullcontext())
        else:
            self.skipped_steps += 1
        self._guard.loss_scale = self._guard.loss_scale.after(overflow=not is_taken)
        self._guard.loss = None
        self._micro_step = 0
        self.zero_grad()
        return is_taken

    def _step_in_list(self, around: AbstractContextManager[None]) -> None:
        """Take a step in the middle of a list; `around` corrects that of the optimizer."""
        self._runtime.before_step()
        self._guard.make_ready()  # tensor ranks compare their gradients; nothing is clipped or left out
        self._optimize(around)
        self.zero_grad()

    def _optimize(self, around: AbstractContextManager[None]) -> None:
        """Step optimizer and LR scheduler; `around` is entered for the step of the optimizer."""
        self._is_ready = True
        try:
            with around:
                if self.optimizer is not None:
                    self.optimizer.step()
                else:
                    self._count_step()
        finally:
            self._is_ready = False
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._halfway.end()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, local sums included, and the micro-batches behind them.

        Raises:
            RuntimeError: a backward has stepped units, with `offload.step_in_backward`, and step() is to end
                this step. Nothing has changed.
        """
        refuse_to_drop(self._runtime.state)
        self._count_dropped()
        self._micro_step = 0
        self._runtime.drop_deferred()
        if set_to_none and type(self.module).zero_grad is nn.Module.zero_grad:
            self._runtime.clear_gradients((*self._runtime.parameters, *self._runtime.ignored))
            return
        with past_guards():  # its guards take longer than the rest
            type(self.module).zero_grad(self.module, set_to_none)

    def _count_dropped(self) -> None:
        """Warn if micro-batches are dropped again and again, so that no step comes."""
        before, number = self._num_dropped, self._num_micro_batches
        self._num_dropped = before + self._micro_step if self._micro_step else 0
        if before < number <= self._num_dropped:
            warn_user(
                f"zero_grad() has dropped the gradients of {self._num_dropped} micro-batches of steps that "
                f"were not finished: with gradient_accumulation_steps={number}, engine.step() zeroes the "
                "gradients itself, at the end of a step; leave zero_grad() out of the loop"
            )

    def set_gradient_accumulation_steps(self, number: int) -> None:
        """Take another number of micro-batches in each step from now on; on all ranks alike.

        It serves a last step of fewer micro-batches, for example. The config keeps its number.

        Raises:
            ValueError: `number` is not an integer >= 1.
            RuntimeError: the call is in the middle of a step, whose gradients are divided by another number.
        """
        if type(number) is not int or number < 1:
            raise ValueError(f"gradient_accumulation_steps: expected an integer >= 1, got {number!r}")
        if self._micro_step or self._runtime.has_gradients:
            raise RuntimeError(
                f"set_gradient_accumulation_steps({number}) in the middle of a step: its gradients are "
                f"divided by {self._num_micro_batches} already. Call it after step() or zero_grad()"
            )
        self._num_micro_batches = number

    @property
    def grad_norm(self) -> Tensor | None:
        """The global gradient norm before the last clipping, 0-dim; None before."""
        return self._guard.grad_norm

    @grad_norm.setter
    def grad_norm(self, norm: Tensor | None) -> None:
        self._guard.grad_norm = norm

    @property
    def loss_scale(self) -> float:
        """The factor of `backward` on the loss; 1.0 if nothing is computed in float16."""
        return self._guard.loss_scale.value

    @property
    def _is_at_boundary(self) -> bool:
        is_last = self._micro_step + 1 >= self._num_micro_batches
        return is_last if self._boundary is None else self._boundary

    def _set_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next `step()` takes an optimizer step; None: micro-batches are counted."""
        if is_boundary is not None and type(is_boundary) is not bool:
            raise ValueError(
                f"set_gradient_accumulation_boundary: expected True, False or None, got {is_boundary!r}"
            )
        self._boundary = is_boundary

    def _judge_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Judge a step that the optimizer begins, unless the engine has judged it already."""
        refuse_averages(self._runtime.state, "an optimizer step")
        if not self._is_ready:
            if self._early is not None:
                self._early.check()
            self._check_own_step(any(value is not None for value in (*args[1:], kwargs.get("closure"))))
            self._guard.make_ready()
        return self._halfway.begin(args, kwargs)

    def _count_step(self) -> None:
        """Count a step of the optimizer."""
        self.global_step += 1
        self._watch(self._guard.grad_norm, self._guard.loss)
        for averages in self._parts.averages.values():
            averages.update()
        if not self._is_ready:
            self._halfway.end()
            if self._early is not None:
                self._early.end()

    def _watch(self, *values: Tensor | None) -> None:
        """Warn of a step with a loss or norm that is not finite, where the host need not wait to see it."""
        if not streams.has_streams(self._runtime.context.device):
            self._guard.watch(self.global_step, *values)

    def _check_own_step(self, has_closure: bool) -> None:
        """Refuse a step by the user if only the engine can take it."""
        self._saver.check(self._axes.world)
        if self._guard.may_skip:
            raise RuntimeError(
                "with float16 or nonfinite='skip' only engine.step() can leave out a step, of the "
                "optimizer and of the LR scheduler: call engine.step(), not optimizer.step()"
            )
        if has_closure and self._guard.needs_gradients:
            raise RuntimeError(
                "clip_grad_norm and nonfinite='error' need the gradients before step(), and a closure "
                "makes them inside: call engine.backward(loss), then step() without a closure"
            )
        if self._num_micro_batches > 1 and not has_closure:
            self._warn_once(
                f"gradient_accumulation_steps={self._num_micro_batches}, but optimizer.step() was called: "
                "only engine.step() counts micro-batches. Call engine.backward(loss) and engine.step() for "
                "each micro-batch; or set gradient_accumulation_steps=1, divide the loss, and step after the "
                "last micro-batch"
            )

    def _warn_once(self, message: str) -> None:
        """Warn of a loop that does not divide or count its micro-batches, at its first step alone."""
        if not self._has_warned:
            self._has_warned = True
            warn_user(message)

    # -- other methods --------------------------------------------------------------------------------

    def register_forward_method(self, name: str) -> None:
        """Let a method of the model other than `forward` use its parameters: `engine.<name>(...)`.

        Inside the method parameters are gathered and freed, and gradients reduced, as in `forward`. The
        engine has a `generate` already.

        Args:
            name: the name of a method of the model; with the name of a part for a method of the part:
                "encoder.encode". All ranks call such a method as `engine.module.encoder.encode(...)`.

        Raises:
            ValueError: the model has no such method, or the engine has something of that name.
        """
        if name == "generate":
            return
        if "." in name:
            register_method_of_part(self._runtime, name)
            return
        if hasattr(Engine, name):
            raise ValueError(
                f"the engine has a method {name!r} of its own: give the model's method another name"
            )
        method = getattr(self.module, name, None)
        if not callable(method):
            raise ValueError(f"expected a method of {type(self.module).__name__}, got {name!r}")
        wrapped = as_forward(self._runtime, method)
        setattr(self, name, wrapped)
        self._runtime.changes.set(self.module, name, wrapped)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own `generate` on this rank's prompts; all ranks must call it.

        All parameters stay gathered meanwhile, in the compute dtype, so ranks may stop at different lengths;
        tensor-parallel ranks must have the same prompts and options.
        If they do not fit, `synced_gpus=True` gathers unit by unit for every token, and transformers keeps
        the ranks in step.

        Raises:
            AttributeError: the model has no method `generate`.
        """
        generate: Any = getattr(self.module, "generate", None)
        if generate is None:
            raise AttributeError(f"{type(self.module).__name__} has no method 'generate'")
        if kwargs.get("synced_gpus"):
            return as_forward(self._runtime, generate)(*args, **kwargs)
        if (dtype := self._runtime.input_dtype(self.module)) is not None:
            args, kwargs = cast_inputs(self.module, args, kwargs, dtype=dtype)
        with held_unsharded(self._runtime):
            return generate(*args, **kwargs)

    # -- the end --------------------------------------------------------------------------------------

    def _let_go(self, restore: bool) -> None:
        super()._let_go(restore)
        self._early = None  # with its thread
        saver, closed = self._saver, cast(Any, self._runtime)
        self._parts = self._axes = self._saver = closed
        saver.finish() if restore else saver.leave_alone()
