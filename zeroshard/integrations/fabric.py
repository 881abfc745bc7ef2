"""A strategy of Lightning Fabric over an engine: `Fabric(strategy=ZeroShardFabricStrategy(config))`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.config.sections import GivenConfig
from zeroshard.engine import Engine
from zeroshard.entry import initialize
from zeroshard.integrations.data_parallel import TAG, parse_of_strategy, refuse


class ZeroShardFabricStrategy(DDPStrategy):
    """Starts ranks and gives them data as DDPStrategy of Fabric does, and shards what `fabric.setup` gets.

    `model, optimizer = fabric.setup(model, optimizer)` shards a model with its optimizer. Then
    `fabric.backward`, `fabric.clip_gradients`, `fabric.no_backward_sync` and `optimizer.step` are the
    engine's. `fabric.save` writes a folder, which `fabric.load` reads at any number of ranks and stage.

    Args:
        config: a Config, a dict, or a path to a .json or .toml file. It has precision, and may have
            `clip_grad_norm`; the loop divides its losses by the micro-batches itself.
        kwargs: arguments of DDPStrategy of Fabric, such as `process_group_backend`.

    Raises:
        ValueError: the config asks for something that the loop of Fabric has or cannot have.
    """

    def __init__(self, config: GivenConfig = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        last = "use fabric.no_backward_sync() for all micro-batches but the last"
        self._config = parse_of_strategy(config, "Fabric", last)
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._backward_sync_control = _EngineSync()

    # -- setup ------------------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the model where it is: `initialize` moves this rank's part of it."""

    def setup_module(self, module: nn.Module) -> Any:
        """Return an engine without an optimizer, for evaluation."""
        return self._shard(module, None)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> Any:
        """Return the engine, the optimizer in a list, and the schedule, which the loop steps."""
        if len(optimizers) != 1:
            raise ValueError(f"fabric.setup: expected a model with one optimizer, got {len(optimizers)}")
        return self._shard(module, optimizers[0]), optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse an optimizer by itself.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "fabric.setup_optimizers: expected the optimizer together with its model, before it is sharded: "
            "model, optimizer = fabric.setup(model, optimizer)"
        )

    def _shard(self, module: nn.Module, optimizer: Optimizer | None) -> Engine:
        precision = self.precision.precision, "32-true", "set precision in the config"
        refuse("ZeroShardFabricStrategy", ("precision", *precision))
        config = replace(self._config, device=str(self.root_device))
        engine = initialize(module, optimizer, config).engine
        self._engines.add(engine)
        return engine

    # -- steps ------------------------------------------------------------------------------------------

    def _engine_of(self, module: Any, call: str) -> Engine:
        if isinstance(module, Engine):
            return module
        if len(self._engines) != 1:
            raise ValueError(
                f"{call}: expected the model as an argument, since {len(self._engines)} were set up"
            )
        return next(iter(self._engines))

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss, which the loop has divided by the micro-batches.

        Raises:
            ValueError: there are further arguments; or several models were set up, and none is named.
        """
        if args or kwargs:
            raise ValueError("fabric.backward: expected a loss, and the model as model=, got more arguments")
        self._engine_of(module, "fabric.backward").backward(tensor, scale_wrt_gas=False)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Call the closure, if there is one, and take the step of the engine; gradients are zeroed.

        Returns:
            The result of the closure.
        """
        result = None if closure is None else closure()
        next(engine for engine in self._engines if engine.optimizer is optimizer).step()
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of the whole model; return their norm."""
        engine = self._engine_of(module, "fabric.clip_gradients")
        return engine.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    # -- checkpoints ------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save the engine in `state`, and the rest of it, into a folder; called on all ranks.

        Raises:
            ValueError: there is no engine in `state`, or several; a filter or storage options are given; a
                value cannot be saved.
        """
        if filter or storage_options:
            raise ValueError("fabric.save: expected no filter and no storage options with zeroshard")
        engine = _engine_in(state, "fabric.save")
        has_optimizer = any(value is engine.optimizer for value in state.values())
        rest = {
            key: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
            for key, value in state.items()
            if value is not engine and value is not engine.optimizer
        }
        engine.save_checkpoint(self.broadcast(path), TAG, rest, optimizer=has_optimizer)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the engine in `state`, and put the rest into `state`; called on all ranks.

        Without its optimizer in `state` the model alone is loaded.

        Returns:
            The values of the checkpoint that `state` has no key for.

        Raises:
            ValueError: there is no engine in `state`, or several; the checkpoint is of another model.
            KeyError: the checkpoint lacks a key of `state`, with `strict`.
        """
        objects: dict[str, Any] = {"model": state} if isinstance(state, Engine) else state or {}
        engine = _engine_in(objects, "fabric.load")
        has_optimizer = any(value is engine.optimizer for value in objects.values())
        rest = engine.load_checkpoint(self.broadcast(path), TAG, optimizer=has_optimizer)
        for key, value in objects.items():
            if value is engine or value is engine.optimizer:
                continue
            if key not in rest:
                if strict:
                    raise KeyError(f"fabric.load: '{path}' has no '{key}': expected it, or strict=False")
                continue
            saved = rest.pop(key)
            if callable(getattr(value, "load_state_dict", None)):
                value.load_state_dict(saved)
            else:
                objects[key] = saved
        return rest


def _engine_in(state: Mapping[str, Any], call: str) -> Engine:
    engines = [value for value in state.values() if isinstance(value, Engine)]
    if len(engines) != 1:
        raise ValueError(
            f"{call}: expected a state with one model of fabric.setup, such as {{'model': model, "
            f"'optimizer': optimizer}}, got {len(engines)}"
        )
    return engines[0]


class _EngineSync(_BackwardSyncControl):
    """Says to an engine which micro-batches are not the last of a step: their sums stay sharded."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        assert isinstance(module, Engine)
        return _before_the_last(module) if enabled else nullcontext()


@contextmanager
def _before_the_last(engine: Engine) -> Iterator[None]:
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
        engine.step()  # counts the micro-batch
    finally:
        engine.set_gradient_accumulation_boundary(None)
