"""The composable layer: a module is sharded in place, with calls for uses beside training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zeroshard import restore as restoring
from zeroshard.assemble import shard_in_place
from zeroshard.config.sections import Config
from zeroshard.full.parameters import full_state_dict, unsharded
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.parameters.saved import NotCopied
from zeroshard.parameters.sharded import count_elements
from zeroshard.parameters.state import refuse_averages, refuse_in_batch, refuse_in_step
from zeroshard.restore import Closed
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import UnitInfo
from zeroshard.stepping.attach import attach
from zeroshard.stepping.clipping import check_clipping
from zeroshard.stepping.guard import StepGuard


class ShardedCalls(NotCopied):
    """The calls around the parameters and gradients of a sharded module."""

    _runtime: Runtime
    _guard: StepGuard

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward adds gradients up on this rank and sends nothing."""
        return self._runtime.reducer.deferring(True)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients by min(1, max_norm / (norm + 1e-6)); collective.

        Args:
            max_norm: the norm that is left at most.
            norm_type: the order of the norm, above 0; inf gives the largest magnitude.
            error_if_nonfinite: True raises if the norm is inf or nan.

        Returns:
            The norm over the gradients of all parameters before that; 0-dim, float32.

        Raises:
            RuntimeError: the norm is not finite, with `error_if_nonfinite`; the message names parameters.
                Gradients are as they were. Or a backward has stepped units, whose gradients are gone, with
                `offload.step_in_backward`.
        """
        order = check_clipping(max_norm, norm_type)
        refuse_in_step(self._runtime.context.state, "clip_grad_norm_()")
        self._runtime.before_step()
        return self._guard.clip(max_norm, order, error_if_nonfinite)

    @contextmanager
    def unsharded(self, *modules: Any, write_back: bool = False) -> Iterator[None]:
        """Show full parameters, in the main dtype, on every rank: to read and to edit, not for a loss.

        Args:
            modules: modules that are parts of the model; none means all of it. Whole units are gathered.
            write_back: keep edits; every rank must make the same ones.

        Raises:
            ValueError: a module is not part of the model.
            RuntimeError: the ranks made different edits; or a batch of a pipeline is under way.
        """
        refuse_in_batch(self._runtime.state, "unsharded()")
        if write_back:
            refuse_averages(self._runtime.state, "unsharded(write_back=True)")
        root = self._runtime.module
        inside = set(root.modules())
        parts = [root if module is self else module for module in modules or (root,)]
        for part in parts:
            if part not in inside:
                raise ValueError(f"unsharded: expected modules of the model, got {type(part).__name__}")
        with unsharded(self._runtime, parts, write_back):
            yield

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return on rank 0 CPU tensors under the original names, parameters in float32; {} on other ranks."""
        return full_state_dict(self._runtime)

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Count the elements of the whole model, tied parameters once. `numel()` of a sharded one is less."""
        return count_elements(self._runtime.module.parameters(), only_trainable=only_trainable)

    @property
    def units(self) -> list[UnitInfo]:
        """The units, each with name, padded size, its reason, and True if it needs no second gather."""
        return self._runtime.unit_infos

    def close(self, restore: bool = True) -> None:
        """Make the model an ordinary module again; collective. A second call does nothing.

        The model has its original parameters again, with the trained values, whole on every rank, in the
        main dtype; with weights of torchao, in the dtypes that they had. Hooks are gone and methods are its
        own. It may be used as it is, or given to `initialize` or `shard` again. Gradients are dropped. The
        optimizer cannot step any more: its states are of slices.

        Args:
            restore: False only gives back memory and waits for no other rank. The model cannot be used then.

        Raises:
            RuntimeError: a forward, backward or `unsharded()` is running, or a parameter was replaced; then
                nothing is closed. Or the last save in the background has failed; then the engine is closed.
        """
        if isinstance(self._runtime, Closed):
            return
        runtime = self._runtime
        restoring.restore(runtime) if restore else restoring.dismantle(runtime)
        runtime.context.axes.world.unwatch()
        self._let_go(restore)

    def _let_go(self, restore: bool) -> None:
        """Forget the parts that were closed with `restore`: any use of them is an error from now on."""
        closed: Any = Closed()
        self._runtime = self._guard = closed


class Sharded(ShardedCalls):
    """A module that `zeroshard.shard` has sharded in place, with calls beside its forward and backward.

    The module is called as before, and `loss.backward()` makes the gradients. It has no checkpoints,
    accumulation, loss scale or nonfinite steps: these belong to an engine.
    """

    module: nn.Module
    """The module that was given."""

    def __init__(self, runtime: Runtime, config: Config) -> None:
        self._runtime, self._guard = runtime, StepGuard(runtime, config)
        self.module = runtime.module

    def attach(self, *optimizers: Optimizer) -> None:
        """Follow optimizers over the sharded parameters, whoever steps them.

        Args:
            optimizers: optimizers that step together, one after the other: replicated parameters are gathered
                after the last of them. Attach an optimizer that steps alone by itself.

        Raises:
            ValueError: an optimizer is one of bitsandbytes, which `zeroshard.initialize` takes over.
        """
        attach(self._runtime, self._guard.rounding, *optimizers)


def shard(
    module: nn.Module,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh: DeviceMesh | None = None,
    tp_plan: Plan | None = None,
) -> Sharded:
    """Shard a module in place over the ranks of the default process group.

    Afterwards `module.parameters()` yields this rank's sharded parameters; make an optimizer over them
    and hand it to `attach(optimizer)` of the result.

    Args:
        module: a module. The values of its parameters are those of rank 0, or those that `deferred_init` has
            recorded.
        config: stage, precision, units, prefetch; a Config, a dict or a path, as `initialize` takes it.
        mesh: a mesh of one axis of any name, or with the axes `dp_replicate` and `dp_shard` for hybrid
            sharding, and `tp` for tensor parallelism; None: over all ranks, as `config` says. Its device type
            is used if neither `config` nor the module has one.
        tp_plan: as `initialize` takes it.

    Raises:
        ValueError: the `config` does not fit the module, the mesh or the ranks.
        RuntimeError: there is no process group.
    """
    config = Config.parse(config)
    return Sharded(shard_in_place(module, config, mesh, tp_plan), config)
