"""The interface of a training loop: a module to call, a backward, a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard import batches, byname, sharded
from zeroshard.checkpoint import capture, load
from zeroshard.checkpoint.capture import EngineState
from zeroshard.checkpoint.save import Saver
from zeroshard.comm.wrappers import refuse_wrappers
from zeroshard.config.sections import Config
from zeroshard.data.microbatch import LossFunction, check_loss
from zeroshard.forwards import methods
from zeroshard.hf import live
from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.warn import warn_user
from zeroshard.memory import report
from zeroshard.optim.asynchronous import method_of
from zeroshard.parallel.pipeline import cut
from zeroshard.parallel.pipeline.training import PipelineTraining
from zeroshard.parameters.saved import NotCopied
from zeroshard.parameters.state import Moment
from zeroshard.plan.placement import SUMMANDS
from zeroshard.sharding.passes import capture_error
from zeroshard.stepping.attach import StepHooks, attach
from zeroshard.stepping.guard import StepGuard
from zeroshard.stepping.parts import EarlySteps


class Engine(NotCopied, nn.Module):
    """A sharded model with its optimizer. `zeroshard.initialize` makes it.

    Its parameters, buffers and modules are the model's, under their original names. Between steps the
    parameters are this rank's 1-D slices. Names that the engine lacks are looked up in the model.
    """

    train_batch, train_batches, eval_batch = batches.train_batch, batches.train_batches, batches.eval_batch
    save_checkpoint, load_checkpoint = capture.save_checkpoint, load.load_checkpoint
    save_pretrained, named_full_parameters = live.save_pretrained, live.named_full_parameters
    full_parameter, set_full_parameter = byname.full_parameter, byname.set_full_parameter
    full_gradient, set_full_gradient = byname.full_gradient, byname.set_full_gradient
    full_optimizer_state = byname.full_optimizer_state
    set_full_optimizer_state = byname.set_full_optimizer_state
    no_sync, unsharded, close = sharded.no_sync, sharded.unsharded, sharded.close
    clip_grad_norm_, full_state_dict = sharded.clip_grad_norm_, sharded.full_state_dict
    num_parameters, units = sharded.num_parameters, property(sharded.units)
    subscribe, on_all = sharded.subscribe, sharded.on_all
    register_forward_method, generate = methods.register_forward_method, methods.generate
    gathered = methods.gathered
    memory_report, reset_memory_report = report.memory_report, report.reset_memory_report
    comm_report, reset_comm_report = report.comm_report, report.reset_comm_report
    pipeline_report = cut.pipeline_report

    module: nn.Module
    """The model that was given."""

    def __init__(
        self, module: nn.Module, parts: EngineState, config: Config, loss_fn: LossFunction | None
    ) -> None:
        super().__init__()
        self.module = module  # it is shared, not registered: so names have no prefix
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self.training = module.training
        self.config = config
        self.optimizer, self.lr_scheduler = parts.optimizer, parts.lr_scheduler
        self.loss_fn = loss_fn
        self._parts, self._runtime, self._axes = parts, parts.runtime, parts.runtime.context.axes
        self._saver = Saver(self._axes.world)
        self.device = parts.runtime.context.device
        """The device that this rank computes on."""
        self.world_size, self.global_rank = self._axes.world.size, self._axes.world.rank
        """The number of ranks, and the number of this one among them."""
        self.dp_world_size, self.dp_rank = self._axes.readers.size, self._axes.readers.rank
        """The same of the ranks that have different data: all but tensor and pipeline ranks of a batch."""
        self.global_step = 0
        """Steps that the optimizer has taken."""
        self.skipped_steps = 0
        """Steps that were not taken because gradients were not finite."""
        max_norm, nonfinite, loss_scale = config.clip_grad_norm, config.nonfinite, config.precision.loss_scale
        is_alone = parts.optimizer is not None
        self._guard = StepGuard(parts.runtime, max_norm, nonfinite, loss_scale, is_alone=is_alone)
        self._part = part = parts.part
        self._pipeline: PipelineTraining | None = None
        self._early: EarlySteps | None = None
        self._micro_step, self._num_micro_batches = 0, config.gradient_accumulation_steps
        self._num_dropped = 0
        """Micro-batches of unfinished steps that zero_grad() has dropped since the last step."""
        self._boundary: bool | None = None
        """True or False if the next `step()` is said to step, or not to; None: micro-batches are counted."""
        if part is not None:
            parts.runtime.state.moments.add(Moment.IN_PARTS)
            self._num_micro_batches = config.pipeline.num_microbatches
            method = method_of(part, parts.runtime, parts.optimizer)
            self._pipeline = PipelineTraining(part, parts.runtime, loss_fn, parts.optimizer, method)
        if parts.optimizer is None and not (part is not None and part.is_frozen):
            parts.runtime.state.moments.add(Moment.NO_OPTIMIZER)
        self._is_ready = False
        """True if `step()` has made the gradients ready for the optimizer."""
        if parts.optimizer is not None:
            judge, count = self._judge_step, self._count_step
            hooks = StepHooks(weakref.WeakMethod(judge), weakref.WeakMethod(count))
            steps = attach(parts.runtime, self._guard.rounding, parts.optimizer, engine=hooks)
            if parts.runtime.context.setting.steps_in_backward is not False:
                self._early = EarlySteps(parts.runtime, parts.optimizer, steps)
        refuse_wrappers([self], object.__setattr__)
        own, plain = weakref.WeakMethod(self.zero_grad), module.zero_grad
        parts.runtime.changes.set(module, "zero_grad", lambda *args, **kw: (own() or plain)(*args, **kw))

    # -- training -------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward."""
        if not isinstance(args, tuple):  # torch.fx gives a proxy in its place
            raise capture_error()
        if self._runtime.context.setting.placements.parameter or self._axes.dp.size == 1:
            self._saver.check()  # elsewhere the ranks may call forward unevenly
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self._runtime.passes.recover()
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
        early = self._early if self.config.offload.step_in_backward else None
        return self._backward(loss, self._num_micro_batches if scale_wrt_gas else 1, early)

    def _backward(self, loss: Tensor, divisor: int, early: EarlySteps | None) -> Tensor:
        self._runtime.state.refuse("backward()", Moment.AVERAGED, Moment.IN_PARTS)
        check_loss(loss)
        reducer, more = self._runtime.reducer, not self.is_gradient_accumulation_boundary()
        send = self._runtime.context.setting.placements.gradient != SUMMANDS
        scale = self._guard.loss_scale.value
        factored = loss * scale if reducer.is_half else loss
        if divisor > 1:
            factored = factored / divisor
        around = nullcontext() if early is None or more else early.around()
        with reducer.next_backward(more, send=send, scale=scale), around:
            factored.backward()
        self._guard.loss = loss.detach()
        return self._guard.loss

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
        self._runtime.state.refuse("step()", Moment.AVERAGED, Moment.IN_PARTS, Moment.NO_OPTIMIZER)
        self._saver.check()
        if not self.is_gradient_accumulation_boundary():
            self._micro_step += 1
            return False
        self._runtime.before_step()
        if self._early is not None:
            self._early.check()
        moments = self._runtime.state.moments
        if not self._runtime.has_gradients and Moment.STEPPED not in moments:
            return self._step_nothing()
        moments.discard(Moment.STEPPED)
        if self._guard.loss is None and self._num_micro_batches > 1:
            warn_user(
                "gradients of loss.backward() are not divided by gradient_accumulation_steps="
                f"{self._num_micro_batches}: call engine.backward(loss), with scale_wrt_gas=False if the "
                "loss is divided already"
            )
        return self._take_step(nullcontext())

    def _step_nothing(self) -> bool:
        """Warn that no backward has reached a parameter."""
        if self._axes.outer.size > 1:
            raise RuntimeError(
                "engine.step() without a gradient: a replica would be a step behind the others, for which "
                "outer_step waits. Give each replica a loss that depends on trained parameters"
            )
        warn_user(
            "engine.step() without a gradient: no backward has reached a parameter since the last "
            "step or zero_grad(), so no step was taken. Call engine.backward(loss) before it, with a "
            "loss that depends on trained parameters"
        )
        self._micro_step = 0
        self.zero_grad()
        return False

    def _take_step(self, around: AbstractContextManager[None]) -> bool:
        """Judge the gradients, step optimizer and LR scheduler, and zero the gradients.

        A pipeline calls it, too. A rank without trained parameters takes part in the agreements all the same.

        Args:
            around: is entered for the step of the optimizer.
        """
        step: Callable[[], object] = self._count_step if self.optimizer is None else self.optimizer.step
        is_taken = self._is_ready = self._guard.make_ready()
        if is_taken:
            try:
                with around:
                    step()
            finally:
                self._is_ready = False
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self._runtime.state.end_step()
        else:
            self.skipped_steps += 1
        self._guard.loss_scale = self._guard.loss_scale.after(overflow=not is_taken)
        self._guard.loss = None
        self._micro_step = self._num_dropped = 0
        self.zero_grad()
        return is_taken

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, local sums included, and the micro-batches that they come from.

        Raises:
            RuntimeError: a backward has stepped units, with `offload.step_in_backward`, and step() is to end
                this step. Nothing has changed.
        """
        self._runtime.state.refuse("zero_grad()", Moment.STEPPED)
        if self._micro_step:
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
        self._num_dropped += self._micro_step
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

    @property
    def loss_scale(self) -> float:
        """The factor of `backward` on the loss; 1.0 if nothing is computed in float16."""
        return self._guard.loss_scale.value

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell, before `step()`, whether that call takes an optimizer step."""
        is_last = self._micro_step + 1 >= self._num_micro_batches
        return is_last if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say, before `backward()`, whether the next `step()` takes an optimizer step.

        `backward()` divides the loss by the number of micro-batches of the config nevertheless, unless it is
        called with `scale_wrt_gas=False`.

        Args:
            is_boundary: True or False until the next call, the same on all ranks. None: micro-batches are
                counted again.
        """
        self._boundary = is_boundary

    def _judge_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Judge a step that the optimizer begins, unless the engine has judged it already."""
        self._runtime.state.refuse("an optimizer step", Moment.AVERAGED)
        if not self._is_ready:
            if self._early is not None:
                self._early.check()
            self._check_own_step(any(value is not None for value in (*args, kwargs.get("closure"))))
            self._guard.make_ready()
        self._runtime.state.begin_step()

    def _count_step(self) -> None:
        """Count a step of the optimizer."""
        self.global_step += 1
        self._guard.watch(self.global_step, self._guard.grad_norm, self._guard.loss)
        for averages in self._parts.averages.values():
            averages.update()
        if not self._is_ready:
            self._runtime.state.end_step()

    def _check_own_step(self, has_closure: bool) -> None:
        """Refuse a step by the user if only the engine can take it."""
        self._saver.check()
        if self._guard.may_skip:
            raise RuntimeError(
                "with float16 or nonfinite='skip' only engine.step() can leave out a step, of the "
                "optimizer and of the LR scheduler: call engine.step(), not optimizer.step()"
            )
        if has_closure and (self.config.clip_grad_norm is not None or self.config.nonfinite == "error"):
            raise RuntimeError(
                "clip_grad_norm and nonfinite='error' need the gradients before step(), and a closure "
                "makes them inside: call engine.backward(loss), then step() without a closure"
            )
        if self._num_micro_batches > 1 and not has_closure:
            warn_user(
                f"gradient_accumulation_steps={self._num_micro_batches}, but optimizer.step() was called: "
                "only engine.step() counts micro-batches. Call engine.backward(loss) and engine.step() for "
                "each micro-batch; or set gradient_accumulation_steps=1, divide the loss, and step after the "
                "last micro-batch"
            )

    # -- a module with the contents of the model -----------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("module")
            if module is None or name.startswith("__"):
                raise
        return getattr(module, name)

    __setattr__ = object.__setattr__  # type: ignore[assignment]
    """Sets an attribute of the engine itself; nn.Module would register it in the model."""

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, for the model as for any module."""
        self.module.train(mode)
        self.training = mode
        return self

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule of the model; get_parameter() and get_buffer() look there too."""
        return self.module.get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's slices under the original names; `full_state_dict()` has the whole model."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load full-shape tensors, the same on every rank; each keeps its slices.

        Raises:
            ValueError: `assign` is true, which would replace the sharded parameters.
        """
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the sharded parameters")
        with self.unsharded(write_back=True):
            return self.module.load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse `.to()`, `.half()`, `.cuda()`, which call this method.

        Raises:
            RuntimeError: always; flat buffers cannot be moved or cast under the optimizer.
        """
        raise RuntimeError(
            "a sharded model cannot be moved or cast: set Config(precision=...) for dtypes; initialize "
            "has moved the model to this rank's device"
        )

    # -- facts and reports ----------------------------------------------------------------------------

    def watch(self, *values: Tensor | float | None) -> None:
        """Warn once of a step with a loss or norm that is not finite, where the host need not wait to see it.

        Args:
            values: losses and norms of the last steps. On an accelerator tensors are not looked at.
        """
        self._guard.watch(self.global_step, *values)

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh; gone once the interpreter ends."""
        assert self._axes.mesh is not None, "the interpreter has not ended"
        return self._axes.mesh

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in a step; `set_gradient_accumulation_steps` changes it."""
        return self._num_micro_batches

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]

    # -- the end --------------------------------------------------------------------------------------

    def _release(self, restore: bool, closed: Any) -> None:
        """Give the last save back, and put a stand-in for parts that are closed into their places."""
        saver, self._early = self._saver, None  # with its thread
        self._parts = self._axes = self._saver = closed
        if restore:
            saver.finish()
