"""A strategy of Lightning over an engine: `Trainer(strategy=ZeroShardStrategy(config))`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.config.sections import GivenConfig
from zeroshard.engine import Engine
from zeroshard.entry import initialize
from zeroshard.integrations.data_parallel import TAG, parse_data_parallel, refuse

_STATE = "lightning.ckpt"
"""The file with the rest of a checkpoint: loops, callbacks, learning-rate schedules. It is written last."""


class ZeroShardStrategy(DDPStrategy):
    """Starts ranks and gives them data as DDPStrategy does, and shards the LightningModule.

    The module is sharded at the start of `fit`, `validate`, `test` or `predict`, and is an ordinary one
    again at the end. Meanwhile `trainer.strategy.engine` is the engine. A checkpoint is a folder, which loads
    at any number of ranks and stage.

    Args:
        config: a Config, a dict, or a path to a .json or .toml file. It has precision and `clip_grad_norm`;
            `accumulate_grad_batches` stays an argument of the Trainer.
        kwargs: arguments of DDPStrategy, such as `process_group_backend`, or `ddp_comm_hook` with
            `ddp_comm_state`: a gradient hook.

    Raises:
        ValueError: the config asks for something that the Trainer has or cannot have.
    """

    engine: Engine | None = None
    """The engine while the Trainer runs."""

    def __init__(self, config: GivenConfig = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        decided = {
            "device": "accelerator and devices of the Trainer",
            "gradient_accumulation_steps": "accumulate_grad_batches of the Trainer",
            "micro_batch_size": "batch_size of your DataLoader",
            "loader": "num_workers and the like of your DataLoader",
        }
        self._config = parse_data_parallel(config, "the strategy of Lightning", decided)
        self._loaded: Path | None = None
        self._has_failed = False
        """True after an exception on this rank: the others may not come to the end."""

    def setup(self, trainer: Trainer) -> None:
        """Make the optimizer and the engine over it.

        Raises:
            ValueError: the Trainer has settings that belong into the config; there are several optimizers, or
                the module steps its optimizer itself.
        """
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        is_automatic = self.lightning_module.automatic_optimization
        refuse(
            "ZeroShardStrategy",
            ("gradient_clip_val", trainer.gradient_clip_val, None, "set clip_grad_norm in the config"),
            ("precision", trainer.precision, "32-true", "set precision in the config"),
            ("automatic_optimization", is_automatic, True, "or use zeroshard.initialize without a Trainer"),
            ("ddp_comm_wrapper", self._ddp_comm_wrapper, None, "give wrapper(hook) as ddp_comm_hook"),
            ("model_averaging_period", self._model_averaging_period, None, "average in a callback"),
        )
        optimizer = None
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if len(self.optimizers) != 1:
                raise ValueError(f"configure_optimizers: expected one optimizer, got {len(self.optimizers)}")
            optimizer = self.optimizers[0]
        config, hook = replace(self._config, device=str(self.root_device)), None
        if optimizer is not None and self._ddp_comm_hook is not None:
            hook = self._ddp_comm_state, self._ddp_comm_hook
        module = self.lightning_module
        self.model = self.engine = initialize(module, optimizer, config, gradient_hook=hook).engine

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute the gradients of a loss, which the Trainer has divided by the micro-batches."""
        assert self.engine is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)  # type: ignore[arg-type]
        self.engine.backward(closure_loss, scale_wrt_gas=False)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)  # type: ignore[arg-type]

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Compute the gradients of the last micro-batch, call the hooks before a step, and step."""
        assert self.engine is not None
        plugin: Any = self.precision_plugin
        result = plugin._wrap_closure(self.lightning_module, optimizer, closure)
        self.engine.step()
        return result

    # -- checkpoints ------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is loaded into the engine."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return no weights: `save_checkpoint` has the engine save them."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return no states: `save_checkpoint` has the engine save them."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        assert self.engine is not None
        has_optimizer = "optimizer_states" in checkpoint
        self.engine.save_checkpoint(filepath, TAG, optimizer=has_optimizer)
        super().save_checkpoint(checkpoint, Path(filepath, _STATE), storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the rest of a checkpoint; `load_model_state_dict` loads the engine.

        Raises:
            OSError: the folder was not saved with this strategy, or is not complete.
        """
        self._loaded = Path(checkpoint_path)
        return super().load_checkpoint(self._loaded / _STATE, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load parameters, and the states of the optimizer if there is one."""
        assert self.engine is not None
        assert self._loaded is not None
        self.engine.load_checkpoint(self._loaded, TAG, optimizer=self.engine.optimizer is not None)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_model_state_dict` has loaded the states."""

    # -- the end ----------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Note that this rank has failed."""
        self._has_failed = True

    def teardown(self) -> None:
        """Make the module an ordinary one again; after an exception only give back memory."""
        engine, self.engine, self.model = self.engine, None, self.lightning_module
        if engine is not None:
            engine.close(restore=not self._has_failed)
        if not self._has_failed:
            super().teardown()
            return
        assert self.accelerator is not None
        for part in (self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()
