"""zeroshard with the calls that `Reference` has, to train a case with an engine."""

from __future__ import annotations

import copy
import shutil
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import zeroshard
from tests.fuzz import place, tiers
from tests.fuzz.cases import Blocks, Case, restaged
from tests.fuzz.habits import halve
from tests.fuzz.models import prediction_of, random_inputs
from tests.fuzz.reference import MAX_NORM, differ, edit, find_ignored, mean_loss


class Sharded:
    """An engine over a copy of the case's model."""

    def __init__(self, case: Case) -> None:
        self.case, self.config = case, case.config
        self.module = copy.deepcopy(case.model)
        ignored = find_ignored(self.module, case.config)
        differ(ignored.values(), case.data_rank)
        self.ignored = frozenset(ignored)
        if dist.get_rank():  # rank 0's values count
            with torch.no_grad():
                for value in (*self.module.parameters(), *self.module.buffers()):
                    if not any(value is own for own in ignored.values()):
                        value.zero_()
        self._folder: str | None = None
        self._begin()

    def _begin(self) -> None:
        case, model, config = self.case, self.module, dict(self.config)
        if case.unit_names is not None:
            chosen = {id(model.get_submodule(name)) for name in case.unit_names}
            config["units"] = lambda module: id(module) in chosen
        if tiers.uses_files(config.get("offload", {})):
            config["offload"] = config["offload"] | {"nvme_path": tempfile.gettempdir()}

        def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return case.make_optimizer(parameters, [p.dim() for p in parameters])

        self.engine, self.optimizer, _, self.scheduler = zeroshard.initialize(
            model,
            make if case.is_factory else make(list(model.parameters())),
            config,
            lr_scheduler=case.make_scheduler,
            loss_fn=lambda output, target: mean_loss(prediction_of(output), target),
            tp_plan=case.tp_plan,
        )
        for parameter in self.engine.parameters() if case.habits.hooks else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(halve)
        self._num_micro_batches = self.engine.config.gradient_accumulation_steps

    def restart(self, stage: int) -> None:
        self.engine.close()
        self.config = restaged(self.config, stage)
        self._begin()

    def end(self) -> None:
        self.engine.close(
            restore=self.case.tp == 1
        )  # waits for a save in the background; no files stay behind
        if self._folder is not None and not dist.get_rank():
            shutil.rmtree(self._folder)

    def set_num_micro_batches(self, number: int) -> None:
        if self.case.loop != "plain" and number != self._num_micro_batches:
            self.engine.set_gradient_accumulation_steps(number)
            self._num_micro_batches = number

    def train(self, mode: bool) -> None:
        self.engine.train(mode)

    @property
    def loss_scale(self) -> float | None:
        """None where there is none."""
        return self.engine.loss_scale if "loss_scale" in self.config["precision"] else None

    @property
    def grad_norm(self) -> Tensor | None:
        return self.engine.grad_norm

    def forward(self, inputs: Tensor, blocks: Blocks) -> Tensor:
        place.delay()
        return prediction_of(self.engine(inputs, **blocks))

    def backward(self, loss: Tensor, *, unsynced: bool) -> None:
        with self.engine.no_sync() if unsynced else nullcontext():
            if self.case.loop == "plain":
                loss.backward()
            else:
                self.engine.backward(loss)

    def step(self) -> None:
        habits = self.case.habits
        if self.case.loop == "plain":
            if habits.norm_type is not None:
                self.engine.clip_grad_norm_(MAX_NORM, habits.norm_type)
            self.optimizer.step()
            self.scheduler.step()
            (self.module if habits.zeroes_model else self.optimizer).zero_grad(self.case.sets_to_none)
        else:
            self.engine.step()

    def train_batch(self, inputs: Tensor, targets: Tensor, blocks: Blocks) -> Tensor:
        return self.engine.train_batch({"inputs": inputs, **blocks}, targets)

    def drop_gradients(self) -> None:
        (self.module if self.case.habits.zeroes_model else self.engine).zero_grad()

    def edit(self, number: int) -> None:
        with self.engine.unsharded(write_back=True):
            edit(dict(self.module.named_parameters()), number)

    def names_with_gradient(self) -> list[str]:
        try:
            return [name for name, p in self.engine.named_parameters() if p.grad is not None]
        except RuntimeError as error:
            if "lacks gradients of micro-batches" not in str(error):
                raise
            return ["refused"]

    def state(self) -> dict[str, Tensor]:
        return self.engine.full_state_dict()

    def own(self) -> dict[str, Tensor]:
        return {name: self.module.get_parameter(name).detach() for name in sorted(self.ignored)}

    # -- checkpoints --------------------------------------------------------------------------------------

    def save(self, *, optimizer: bool, blocking: bool) -> None:
        if self._folder is None:
            folder = [None if dist.get_rank() else tempfile.mkdtemp(prefix="fuzz-")]
            if dist.get_world_size() > 1:
                dist.broadcast_object_list(folder, 0)
            self._folder = folder[0]
        self.engine.save_checkpoint(self._folder, blocking=blocking, optimizer=optimizer)

    def load(self, *, optimizer: bool) -> bool:
        assert self._folder is not None, "a case saves first"
        try:
            self.engine.load_checkpoint(self._folder, optimizer=optimizer)
        except ValueError as error:
            if "leaves out the frozen parameter" not in str(error):
                raise
            return False
        return True

    # -- by name ------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        own = {self.module.get_parameter(name) for name in self.ignored}
        return [n for n, p in self.engine.named_parameters(remove_duplicate=False) if p not in own]

    def shape_of(self, name: str) -> torch.Size:
        return self.case.model.get_parameter(name).shape

    def is_trained(self, name: str) -> bool:
        return self.module.get_parameter(name).requires_grad

    def full_parameter(self, name: str) -> Tensor:
        return self.engine.full_parameter(name)

    def full_gradient(self, name: str) -> Tensor | None:
        return self.engine.full_gradient(name)

    def full_optimizer_state(self, name: str) -> dict[str, Any]:
        return self.engine.full_optimizer_state(name)

    def set_full_parameter(self, name: str, values: Tensor) -> None:
        self.engine.set_full_parameter(name, values)

    def set_full_gradient(self, name: str, values: Tensor) -> None:
        self.engine.set_full_gradient(name, values)

    def set_full_optimizer_state(self, name: str, values: dict[str, Any]) -> None:
        self.engine.set_full_optimizer_state(name, values)

    # -- what is refused ----------------------------------------------------------------------------------

    def record(self, tracer: str) -> None:
        inputs = random_inputs(self.case.model.kind, 2, torch.Generator().manual_seed(0)).to(place.device())
        blocks = {"called": tuple(range(len(self.case.model.blocks)))}
        self.train(False)  # linearize runs the forward once before it records
        try:
            if tracer == "linearize" and inputs.is_floating_point():
                torch.func.linearize(lambda x: self.forward(x, blocks), inputs)
            else:
                make_fx(lambda x: self.forward(x, blocks))(inputs)
        except RuntimeError as error:
            if "a sharded model cannot be called inside" in str(error):
                return
            raise
        finally:
            self.train(True)
        raise AssertionError(f"{tracer} has recorded a sharded model")
