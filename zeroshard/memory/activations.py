"""Activations of a micro-batch: formulas for a number of parameters, and a run of a model without memory.

The formulas are for a decoder-only transformer, and for what its tensor ranks send.

The backward of a block needs so many tensors of tokens x width elements, in the compute dtype:

    whole on each rank    5    the inputs of both norms and of both divided pairs, and dropout masks
    divided over tp      12    queries, keys, values and attention (4), and twice 4 x width after it

In 16 bits that is s b h (10 + 24 / tp) bytes. Fused kernels compute attention scores again in the backward,
as selective recomputation does. If parts of the sequence lie on the tensor ranks, the first row is divided,
too. With recomputation of each block only its input is kept, and one block is there whole. After the blocks
come the inputs of the last norm and of the head, and the logits in float32.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equations 1
to 6, and section 4.3 for the embedding and the head.

The sizes of a typical model with a given number of parameters, as integers.

The rule is a decoder-only transformer in the manner of Llama 3:

    blocks        12 * depth * width**2 parameters: Kaplan et al. 2020, "Scaling Laws for Neural Language
                  Models", section 2.1
    width         128 * depth: Llama 3 has 32 x 4096 at 8 B and 126 x 16384 at 405 B; GPT-3 has 96 x 12288.
                  Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3; Brown et al. 2020, table 2.1
    embedding     128256 * width parameters, the vocabulary of Llama 3, but at most a half of all
    head          as large as the embedding; the same tensor below 4 B, as in Llama 3.2 of 1 B and 3 B

`tests/memory/test_estimate.py` compares it with Llama 3 and 3.2 of 1 B to 70 B: the gathered parameters at
the peak are within an eighth. Llama 2 of 7 B, whose vocabulary is 32000, gathers about half of that.

The run is a forward and a backward on the meta device, of a copy of the model. Its parameters have the
compute dtype, divided layers have the shapes of one tensor rank, and units are recomputed if the config says
so. All of it is done by the code that an engine uses. The storages of the tensors that stay alive are
counted: those that autograd saves, and those that the model itself holds, each once.

    forward  | embedding | unit | unit | unit | head, loss |        bytes alive are read where a module ends
    backward                            | unit again | ...          and here, if units are recomputed

Of each unit the bytes that it leaves and its operations are counted, from which `forwards/keeping.py` plans
what a budget costs. The backward counts as two forwards. The root, which is not recomputed, is the last unit.

Attention is fused, as on GPUs and CPUs: `scaled_dot_product_attention` saves its inputs, its output and a
float32 for each query and head (Dao et al. 2022, "FlashAttention", section 3.1). A model that computes
attention by other operations is counted with these.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.assemble import divide_and_cast, find_module_casts, specify_units
from zeroshard.config.sections import Config
from zeroshard.forwards.keeping import NO_LINK, Interval, Link, UnitProfile, choose_keeping, time_line
from zeroshard.forwards.lean import change_mlps
from zeroshard.forwards.quantized import is_quantized
from zeroshard.forwards.tiled import ROW_BYTES, TILE_BYTES
from zeroshard.forwards.wrapped import checkpointed, outermost
from zeroshard.internals import pytree
from zeroshard.internals.nested import cast_inputs, cast_outputs, find_tensors
from zeroshard.parallel.pipeline.profile import Assumed
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.parallel.tensor.losses import tile_losses
from zeroshard.parallel.tensor.sequence import Activations
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.plan.buffers import Setting
from zeroshard.plan.originals import computes_in_own_dtype
from zeroshard.plan.placement import TP
from zeroshard.plan.units import UnitSpec
from zeroshard.sharding.context import Changes

WIDTH_PER_BLOCK = 128
VOCABULARY = 128_256
TIED_BELOW = 4 * 10**9
RECOMPUTED = ("unit", "auto")
"""The settings in which blocks are computed again; with a budget in bytes as few as it has no room for."""
SMALLEST, LARGEST = 1 << 20, 10**15
"""The numbers of parameters for which the rule makes sense."""
_DEEPEST = 1 << 11
"""More blocks than the largest model has by the rule: 12 * 2048 * (128 * 2048)**2 is above 10**15."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The parameters of each part of a model; all parts together have the number that was asked for."""

    num_params: int
    depth: int
    """The number of blocks."""
    width: int
    embedding: int
    is_tied: bool
    """True if the head is the embedding; otherwise the head is as large again."""

    @property
    def vocabulary(self) -> int:
        """Logits of a token."""
        return self.embedding // self.width

    @property
    def blocks(self) -> list[int]:
        """Parameters of each block. The sizes differ by 1 at most."""
        total = self.num_params - self.embedding * (1 if self.is_tied else 2)
        return [total // self.depth + (number < total % self.depth) for number in range(self.depth)]

    def bytes_of_input(self, num_tokens: int, config: Config) -> int:
        """Bytes of the input of a block on one rank."""
        one = self._bytes_of_width(num_tokens, config)
        return -(-one // config.mesh.tp) if config.mesh.sequence else one

    def bytes_of_block(self, num_tokens: int, config: Config) -> int:
        """Bytes that the backward of a block needs on one rank."""
        one, tp = self._bytes_of_width(num_tokens, config), config.mesh.tp
        if config.mesh.sequence:
            return -(-one * (_WHOLE + _DIVIDED) // tp)
        return one * _WHOLE - (-one * _DIVIDED // tp)

    def bytes_of_head(self, num_tokens: int, config: Config) -> int:
        """Bytes of the inputs of the last norm and of the head, and of the logits."""
        logits, tp = _LOGIT * num_tokens * self.vocabulary, config.mesh.tp
        if config.loss.tiles != "none":  # the gradient of the weight waits for the backward, in float32
            logits = min(logits * ROW_BYTES // _LOGIT, TILE_BYTES * tp) + _LOGIT * self.embedding
        return 2 * self.bytes_of_input(num_tokens, config) - (-logits // tp) if self.vocabulary else 0

    def bytes_held(self, num_tokens: int, config: Config) -> int:
        """Bytes of activations of a rank with all blocks, at most, for one micro-batch of so many tokens."""
        block, head = self.bytes_of_block(num_tokens, config), self.bytes_of_head(num_tokens, config)
        if config.recompute in RECOMPUTED:
            return self.depth * self.bytes_of_input(num_tokens, config) + max(block, head)
        return self.depth * block + head

    def units(self, num_tokens: int, config: Config) -> list[UnitProfile]:
        """The blocks, and the head; without the operations of attention scores."""
        kept, inputs = self.bytes_of_block(num_tokens, config), self.bytes_of_input(num_tokens, config)
        num_bytes = {"kept": kept, "inputs": inputs, "moved": kept}
        units = [_counted(2 * block * num_tokens, **num_bytes) for block in self.blocks]
        head = self.bytes_of_head(num_tokens, config)
        return [*units, _counted(2 * self.embedding * num_tokens, working=head)]

    def bytes_sent(self, num_tokens: int, config: Config) -> int:
        """Bytes that a rank sends to its tensor ranks in a micro-batch, for all blocks.

        A sum sends 2 (tp - 1) / tp of its bytes, as a reduce-scatter and an all-gather in its place do.
        """
        # A recomputation ends before the last sum of a block.
        num, tp = self.depth * (_EXCHANGES + (config.recompute in RECOMPUTED)), config.mesh.tp
        return num * 2 * self._bytes_of_width(num_tokens, config) * (tp - 1) // tp

    def _bytes_of_width(self, num_tokens: int, config: Config) -> int:
        return num_tokens * self.width * (config.precision.param_dtype or torch.float32).itemsize


def typical_sizes(num_params: int) -> Sizes:
    """Return the sizes of a typical model with exactly this number of parameters.

    Raises:
        ValueError: there are fewer or more parameters than this rule makes sense for.
    """
    if not SMALLEST <= num_params <= LARGEST:
        raise ValueError(
            f"expected a model, or a number of {SMALLEST:,} to {LARGEST:,} parameters, got {num_params:,}"
        )
    is_tied = num_params < TIED_BELOW
    num_tables = 1 if is_tied else 2

    def distance(depth: int) -> int:
        width = WIDTH_PER_BLOCK * depth
        return abs(12 * depth * width**2 + num_tables * VOCABULARY * width - num_params)

    depth = min(range(1, _DEEPEST), key=distance)
    width = WIDTH_PER_BLOCK * depth
    embedding = min(VOCABULARY * width, num_params // 2)
    return Sizes(num_params=num_params, depth=depth, width=width, embedding=embedding, is_tied=is_tied)


_WHOLE, _DIVIDED = 5, 12
_EXCHANGES = 4
"""Sums over the tensor ranks for each block: 2 in the forward, 2 in the backward."""
_LOGIT = 4
"""Bytes of a logit: the loss is computed in float32."""


# -------------------------------------------------------------------------------- the run without memory

_META = torch.device("meta")
_Value = TypeVar("_Value")

LossOf = Callable[[nn.Module], Tensor]
"""(model on the meta device) -> the loss of a micro-batch. Tensors that it makes are on the meta device."""


class DryRun(NamedTuple):
    """Bytes of activations of a micro-batch on one rank."""

    peak: int = 0
    """The most bytes at the end of a module's forward, in a recomputation too, or before the backward."""
    sent: int = 0
    """Bytes that the rank sends to the other tensor ranks, in forward and backward."""
    units: Sequence[UnitProfile] = ()
    """The units whose forward may run again, and the root, with operations in the place of seconds."""
    others: int = 0
    """Bytes that are there besides."""
    link: Link | None = None
    """The link to the host, in bytes per operation, if activations may go there."""

    def within(self, budget: float | None) -> tuple[int, float, tuple[Interval, ...]]:
        """Return the most bytes of a plan for a budget, the share of time that it adds, and its time line.

        Args:
            budget: bytes for activations; None: all units recompute.
        """
        keep = sum(unit.forward + unit.backward for unit in self.units)
        if budget is None:
            return self.peak, sum(unit.forward for unit in self.units[:-1]) / max(keep, 1), ()
        units, link = [unit.options(self.link) for unit in self.units], self.link or NO_LINK
        plan = choose_keeping(units, int(budget) - self.others, link)
        longer = plan.seconds / max(keep, 1) - 1
        return plan.peak + self.others, longer, tuple(time_line(plan, link))


def has_plan(config: Config) -> bool:
    """True if a budget in bytes says which units recompute; a share is of a device that is not known."""
    return config.recompute == "auto" and (config.memory_budget or 0) > 1


def _counted(operations: float, **num_bytes: int) -> UnitProfile:
    """The profile of a unit with so many operations in its forward."""
    return UnitProfile(forward=operations, backward=2 * operations, again=operations, **num_bytes)


def dry_run(
    model: nn.Module, config: Config, setting: Setting, loss_of: LossOf, tp_plan: Plan | None = None
) -> DryRun:
    """Run the forward and the backward of a micro-batch of a model, without memory.

    Args:
        model: the model; it does not change, and is not read.
        config: the config.
        setting: the setting of its plans.
        loss_of: computes the loss.
        tp_plan: see `plan_division`.

    Raises:
        ValueError: the forward or backward raises an error without values.
    """
    with torch.random.fork_rng(devices=[]):  # divided layers set the generator
        over = OneOfMany(setting.sizes[TP])
        runs, specs = prepared(model, config, setting, tp_plan, over)
        work, attention = LiveBytes([*runs.parameters(), *runs.buffers()]), FusedAttention()
        assumed = Assumed()  # type: ignore[no-untyped-call]
        peak = after = inside = 0
        begins, units = list[tuple[int, int]](), list[UnitProfile]()

        def now() -> tuple[int, int]:
            return work.now, work.flops + attention.products

        def end(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal after
            (after, done), (before, begun) = now(), begins.pop()
            made = sum(one.nbytes for one in find_tensors(output)[0])
            kept, working = max(after - before, made), inside - before
            units.append(_counted(done - begun, kept=kept, inputs=made, moved=kept, working=working))

        def sample(*_: Any) -> None:
            nonlocal peak, inside
            peak, inside = max(peak, work.now), max(inside, work.now)

        def begin(*_: Any) -> None:
            nonlocal inside
            inside = work.now
            begins.append(now())

        for module in runs.modules():
            module.register_forward_hook(sample)
        for block in _blocks(runs, specs):
            block.register_forward_pre_hook(begin)
            block.register_forward_hook(end)
        try:
            with _META, torch.enable_grad(), attention, assumed, work:
                loss = loss_of(runs)
                sample()
                (_, done), most = now(), peak
                loss.backward()
        except Exception as error:  # of any kind, as the model and the loss are the user's
            raise ValueError(
                f"activations of {type(model).__name__}: the forward and backward run without memory, and "
                f"raise {type(error).__name__}: {error}. num_tokens= is for causal language models of "
                "transformers; loss_of= computes the loss of any other model"
            ) from error
    others = after - sum(unit.kept or 0 for unit in units)
    units.append(_counted(done - sum(unit.forward for unit in units), working=most - after))
    return DryRun(peak, over.sent, units, others)


def loss_of_tokens(shape: tuple[int, int]) -> LossOf:
    """Return the loss of a causal language model of transformers over tokens, [samples, length]."""

    def loss_of(runs: nn.Module) -> Tensor:
        ids = torch.zeros(shape, dtype=torch.long)
        loss: Tensor = runs(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    return loss_of


class LiveBytes(TorchDispatchMode):
    """Counts the storages of the results of operations, each once, on any device.

    It counts operations of products, too, and bytes that all other operations read and write. torch's own
    counter of operations keeps their tensors alive.

    Args:
        left_out: tensors whose storages do not count, such as parameters.
    """

    def __init__(self, left_out: Iterable[Tensor] = ()) -> None:
        from torch.utils.flop_counter import flop_registry  # it loads much of torch

        super().__init__()  # type: ignore[no-untyped-call]
        self._registry: Any = flop_registry
        self.now = self.flops = self.traffic = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in left_out:
            self._note(tensor.untyped_storage(), 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, count it and note its results."""
        results = func(*args, **(kwargs or {}))
        made = [one for one in pytree.tree_leaves(results) if isinstance(one, Tensor)]
        for result in made:
            storage = result.untyped_storage()
            self._note(storage, storage.nbytes())
        if (count := self._registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=results)
        elif not func.is_view:
            given = [one for one in pytree.tree_leaves(args) if isinstance(one, Tensor)]
            self.traffic += sum(one.nbytes for one in (*given, *made))
        return results

    def _note(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        # The storage of a tensor is one Python object while it lives, so its id is its own.
        key = id(storage)
        if key in self._alive:
            return

        def drop(_: Any) -> None:
            del self._alive[key]
            self.now -= num_bytes

        self._alive[key] = weakref.ref(storage, drop)
        self.now += num_bytes


def without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; layers with codes are layers with numbers there."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device=_META)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=_META)
    layers: Iterable[Any] = filter(is_quantized, model.modules())
    for layer in layers:  # a frozen layer of plain numbers keeps what one with codes keeps
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, _META)
        memo[id(layer)] = plain.requires_grad_(False)
    return copy.deepcopy(model, memo)


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
    casts = find_module_casts(model, division.specs, config)
    originals = [original for spec in division.specs for original in spec.originals]
    for original in originals:
        given = original.parameter
        dtype = setting.dtypes.of(original).param_dtype or given.dtype
        local = nn.Parameter(
            torch.empty(original.shape, dtype=dtype, device=_META), requires_grad=given.requires_grad
        )
        local.register_post_accumulate_grad_hook(_drop_gradient) if local.requires_grad else None
        for module, attribute in original.owners:
            module._parameters[attribute] = local
    divide_and_cast(model, division, casts, over if over.size > 1 else None, changes)
    tile_losses(model, specs, config, changes)
    change_mlps(model, config, changes)
    if config.recompute in RECOMPUTED and not has_plan(config):
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
        model.register_forward_hook(lambda module, args, output: cast_outputs(output, cast_to))
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


class FusedAttention(TorchFunctionMode, ContextDecorator):
    """Attention without scores in memory; the meta device has only the kernel that keeps them.

    A context, or the decorator of a function that runs in it.
    """

    products = 0
    """The operations of its forwards so far."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            self.products += (
                2 * query.numel() * key.shape[-2] * (1 if kwargs and kwargs.get("is_causal") else 2)
            )
            return _Attention.apply(query, key, value)
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """[..., heads, queries, size], [..., heads or fewer, keys, size] twice -> [..., heads, queries, size]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        *batch, heads, length, _ = query.shape
        output = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-3, -2)  # as kernels do
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
