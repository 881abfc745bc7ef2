"""Activations of a micro-batch of a model, and what each unit leaves and computes, by a run without memory.

A copy of the model runs. Its parameters have the compute dtype, divided layers have the shapes of one tensor
rank, and units are recomputed if the config says so. All of it is done by the code that an engine uses. The
storages of the tensors that stay alive are counted: those that autograd saves, and those that the model
itself holds, each once.

    forward  | embedding | unit | unit | unit | head, loss |        bytes alive are read where a module ends
    backward                            | unit again | ...          and here, if units are recomputed

Of each unit the bytes that it leaves and its operations are counted, from which `forwards/keeping.py` plans
what a budget costs. The backward counts as two forwards. The root, which is not recomputed, is the last unit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zeroshard.assemble import own_part, prepare_forwards, specify_units
from zeroshard.config.sections import Config
from zeroshard.forwards import dryrun
from zeroshard.forwards.dryrun import META, FusedAttention, LossOf, Modules, Trace, without_memory
from zeroshard.forwards.keeping import UnitProfile
from zeroshard.forwards.lean import change_mlps
from zeroshard.forwards.quantized import num_scale_bytes
from zeroshard.forwards.wrapped import checkpointed, outermost
from zeroshard.internals.nested import cast_inputs, cast_tensors
from zeroshard.memory.typical import RECOMPUTED, DryRun, RankUnits, counted, planned_bytes
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.cut import cut_model
from zeroshard.parallel.pipeline.weights import Products, Waiting
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.parallel.tensor.sequence import Activations
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.plan.buffers import Setting, plan_units
from zeroshard.plan.originals import computes_in_own_dtype
from zeroshard.plan.placement import TP
from zeroshard.plan.units import UnitSpec
from zeroshard.sharding.context import Changes

_Value = TypeVar("_Value")
RowsOf = Callable[[nn.Module, Sequence[UnitSpec]], Modules]
"""(model, its units with the root first) -> the modules that have a row."""


def loss_of_tokens(shape: tuple[int, int]) -> LossOf:
    """Return the loss of a causal language model of transformers over tokens, [samples, length]."""

    def loss_of(runs: nn.Module) -> Any:
        ids = torch.zeros(shape, dtype=torch.long)
        return runs(input_ids=ids, labels=ids, use_cache=False).loss

    return loss_of


def prepared(
    model: nn.Module, config: Config, setting: Setting, tp_plan: Plan | None, over: Activations
) -> tuple[nn.Module, Sequence[UnitSpec]]:
    """Return a copy of a model on the meta device that runs as in an engine; arguments as in `dry_run`.

    Args:
        over: the exchanges of its tensor rank.

    Returns:
        The copy, with the dtypes, the parts and the forwards that it has in an engine; and its units, the
        root first.
    """
    model = without_memory(model)
    specs, changes = specify_units(model, config), Changes()
    division = plan_division(model, specs, tp_plan, over.size, by_sequence=config.mesh.sequence)
    casts = prepare_forwards(model, division, config, over if over.size > 1 else None, changes)
    change_mlps(model, config.recompute, config.mlp.tiles, changes)
    originals = [original for spec in division.specs for original in spec.originals]
    for original in originals:
        given = original.parameter
        dtype = setting.dtypes.of(original).param_dtype or given.dtype
        local = nn.Parameter(
            torch.empty(original.shape, dtype=dtype, device=META), requires_grad=given.requires_grad
        )
        local.register_post_accumulate_grad_hook(_drop_gradient) if local.requires_grad else None
        for module, attribute in original.owners:
            module._parameters[attribute] = local
    if config.recompute in RECOMPUTED and not planned_bytes(config):
        for module in _blocks(model, specs):
            # Autograd runs a recomputation outside of the mode of the run.
            changes.around(module, "fused attention", FusedAttention())
            changes.around(module, "recompute", functools.partial(checkpointed, module))
    precision = config.precision
    if precision.param_dtype is not None:
        for spec in specs:
            cast = functools.partial(cast_inputs, dtype=precision.param_dtype, in_lists=spec is specs[0])
            if spec.module not in casts and not computes_in_own_dtype(spec.module):
                spec.module.register_forward_pre_hook(cast, with_kwargs=True)
    if (cast_to := precision.output_dtype) is not None:
        model.register_forward_hook(lambda module, args, output: cast_tensors(output, cast_to))
    return model, specs


def _blocks(model: nn.Module, specs: Sequence[UnitSpec]) -> list[nn.Module]:
    """The modules whose forward may run again."""
    return list(outermost(model, {spec.module for spec in specs[1:] if spec.originals}))


def _drop_gradient(parameter: Tensor) -> None:
    """Gradients are no activations."""
    parameter.grad = None


class OneOfMany(Activations):
    """The exchanges of a tensor rank without the others: results have their shapes, and memory of their own.

    Args:
        size: the ranks.
    """

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.device, self.last = 0, size, torch.device("cpu"), None
        self.sent = self.calls = 0

    def sum(self, value: Tensor, label: str) -> Tensor:
        self.calls += 1
        self.sent += 2 * value.nbytes * (self.size - 1) // self.size
        return value.contiguous().clone()

    def gather(self, value: Tensor, dim: int, label: str) -> Tensor:
        self.calls += 1
        self.sent += value.nbytes * (self.size - 1)
        return torch.cat([value] * self.size, dim)

    def scatter(self, value: Tensor, dim: int, label: str) -> Tensor:
        self.calls += 1
        self.sent += value.nbytes * (self.size - 1) // self.size
        return self.split(value, dim).clone()

    def first(self, value: _Value, label: str) -> _Value:
        return value


class ModelWithoutMemory:
    """A model whose units are planned for several configs; each way to run it is counted once.

    Args:
        model: the model; it does not change, and is not read.
        loss_of: computes the loss of a micro-batch; None if nobody asks for activations.
        tp_plan: see `plan_division`.
    """

    def __init__(self, model: nn.Module, loss_of: LossOf | None, tp_plan: Plan | None) -> None:
        self._model, self._loss_of, self._tp_plan = model, loss_of, tp_plan
        self._runs: dict[str, DryRun] = {}

    def trace(self, config: Config, setting: Setting, rows_of: RowsOf, *, is_halved: bool = False) -> Trace:
        """Count a micro-batch of the model as an engine runs it, on one tensor rank.

        Args:
            config: the config.
            setting: the setting of its plans.
            rows_of: chooses the modules to count.
            is_halved: True for the first half of a backward alone.

        Raises:
            ValueError: the forward or backward raises an error without values.
        """
        assert self._loss_of is not None
        with torch.random.fork_rng(devices=[]):  # divided layers set the generator
            over = OneOfMany(setting.sizes[TP])
            runs, specs = prepared(self._model, config, setting, self._tp_plan, over)
            rows = rows_of(runs, specs)
            halves = Products(runs, Changes()).deferring(Waiting()) if is_halved else nullcontext()
            try:
                with halves:
                    return dryrun.count(runs, rows, self._loss_of, over)
            except Exception as error:  # of any kind, as the model and the loss are the user's
                raise ValueError(
                    f"activations of {type(self._model).__name__}: the forward and backward run without "
                    f"memory, and raise {type(error).__name__}: {error}. num_tokens= is for causal language "
                    "models of transformers; loss_of= computes the loss of any other model"
                ) from error

    def usage(self, config: Config, setting: Setting) -> DryRun:
        """Return what a micro-batch takes; it depends neither on the stage nor on tiers."""
        ways = config.recompute, bool(planned_bytes(config)), config.loss, config.mlp
        key = repr((config.precision, ways, config.mesh, config.units, config.ignored))
        if key not in self._runs:
            self._runs[key] = _usage_of(self.trace(config, setting, _rows))
        return self._runs[key]

    def planned(self, config: Config, setting: Setting) -> Iterator[RankUnits]:
        """Yield what each pipeline rank holds; the model does not change."""
        model = self._model
        if config.mesh.pp == 1:
            yield self._units_of(model, specify_units(model, config), config, setting)
        elif config.pipeline.trace:
            raise ValueError(
                "pipeline.trace: an estimate cannot trace a model, whose samples it does not have: expected "
                "False"
            )
        else:
            cpu, chunks = torch.device("cpu"), Chunked(without_memory(model))
            cut = cut_model(chunks, config.pipeline, config.mesh.pp, cpu, None)
            for rank in range(cut.num_ranks):
                whole = without_memory(model)
                part, narrowed = own_part(Chunked(whole), config, cut, rank)
                specs = part.named(specify_units(whole, narrowed))
                yield self._units_of(whole, specs, narrowed, setting)

    def _units_of(
        self, model: nn.Module, specs: Sequence[UnitSpec], config: Config, setting: Setting
    ) -> RankUnits:
        tp, is_sequence = setting.sizes[TP], config.mesh.sequence
        divided = plan_division(model, specs, self._tp_plan, tp, by_sequence=is_sequence).specs
        return plan_units(divided, setting), sum(map(num_scale_bytes, model.modules()))


def _rows(model: nn.Module, specs: Sequence[UnitSpec]) -> Modules:
    return {"": model} | {str(number): block for number, block in enumerate(_blocks(model, specs))}


def _usage_of(trace: Trace) -> DryRun:
    root, *blocks = trace.rows.values()
    units, after = list[UnitProfile](), int(trace.end_of_rows[dryrun.ALIVE])
    for row in blocks:
        kept, working = max(int(row.forward[dryrun.ALIVE]), row.made), int(row.most[dryrun.ALIVE])
        operations = int(row.forward[dryrun.FLOPS] + row.forward[dryrun.PRODUCTS])
        units.append(counted(operations, kept=kept, inputs=row.made, moved=kept, working=working))
    others = after - sum(unit.kept or 0 for unit in units)
    operations = int(root.forward[dryrun.FLOPS] + root.forward[dryrun.PRODUCTS])
    units.append(counted(operations, working=int(trace.peak_of_forward[dryrun.ALIVE]) - after))
    return DryRun(int(trace.peak[dryrun.ALIVE]), int(trace.last[dryrun.SENT]), units, others)
