"""What a micro-batch takes on a rank, and formulas of it for a typical model of a number of parameters.

The rule is a decoder-only transformer in the manner of Llama 3:

    blocks        12 * depth * width**2 parameters: Kaplan et al. 2020, "Scaling Laws for Neural Language
                  Models", section 2.1
    width         128 * depth: Llama 3 has 32 x 4096 at 8 B and 126 x 16384 at 405 B; GPT-3 has 96 x 12288.
                  Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3; Brown et al. 2020, table 2.1
    embedding     128256 * width parameters, the vocabulary of Llama 3, but at most a half of all
    head          as large as the embedding; the same tensor below 4 B, as in Llama 3.2 of 1 B and 3 B

`tests/memory/test_estimate.py` compares it with Llama 3 and 3.2 of 1 B to 70 B: the gathered parameters at
the peak are within an eighth. Llama 2 of 7 B, whose vocabulary is 32000, gathers about half of that.

The backward of a block needs so many tensors of tokens x width elements, in the compute dtype:

    whole on each rank    5    the inputs of both norms and of both divided pairs, and dropout masks
    divided over tp      12    queries, keys, values and attention (4), and twice 4 x width after it

In 16 bits that is s b h (10 + 24 / tp) bytes. Fused kernels compute attention scores again in the backward,
as selective recomputation does. If parts of the sequence lie on the tensor ranks, the first row is divided,
too. With recomputation of each block only its input is kept, and one block is there whole. After the blocks
come the inputs of the last norm and of the head, and the logits in float32.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equations 1
to 6, and section 4.3 for the embedding and the head.

Nothing here needs torch: an estimate of a number comes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zeroshard.config.dtypes import dtype_of
from zeroshard.config.sections import ROW_BYTES, TILE_BYTES, Config
from zeroshard.forwards.keeping import UnitProfile
from zeroshard.plan.buffers import Setting, UnitPlan, plan_buffer, tiers_of_units
from zeroshard.plan.originals import Original
from zeroshard.plan.placement import TP

RankUnits = tuple[list[UnitPlan], int]
"""The units of a pipeline rank, the root first; and bytes of quantized weights other than their codes."""
RECOMPUTED = ("unit", "auto")
"""The settings in which blocks are computed again; with a budget in bytes as few as it has no room for."""


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


def planned_bytes(config: Config) -> float:
    """The bytes of a budget that says which units recompute; 0 for none, or a share of a device."""
    budget = config.memory_budget or 0  # only recompute="auto" takes one, and no device is known
    return budget if budget > 1 else 0


def counted(operations: float, **num_bytes: int) -> UnitProfile:
    """The profile of a unit with so many operations in its forward."""
    return UnitProfile(forward=operations, backward=2 * operations, again=operations, **num_bytes)


# ----------------------------------------------------------------------------------- sizes of a typical model

WIDTH_PER_BLOCK = 128
VOCABULARY = 128_256
TIED_BELOW = 4 * 10**9
_WHOLE, _DIVIDED = 5, 12
_EXCHANGES = 4
"""Sums over the tensor ranks for each block: 2 in the forward, 2 in the backward."""
_LOGIT = 4
"""Bytes of a logit: the loss is computed in float32."""
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


class _Elements(NamedTuple):
    """A trained parameter of which nothing is known but the number of elements."""

    shape: tuple[int]
    dtype: Any
    requires_grad: bool = True

    def is_floating_point(self) -> bool:
        return True


def plan_number(sizes: Sizes, config: Config, setting: Setting) -> list[UnitPlan]:
    """Plan the units of a typical model: the root, which holds a tied table, the table, blocks, the head.

    Raises:
        ValueError: a pipeline or dtypes by name, which need the names of a model.
    """
    if config.precision.overrides or config.mesh.pp > 1:
        raise ValueError(
            "precision.overrides, mesh.pp > 1: expected a model, whose parameters and blocks have names, got "
            "a number of parameters"
        )
    tp = setting.sizes[TP]
    table, blocks = -(-sizes.embedding // tp), [-(-block // tp) for block in sizes.blocks]
    nums = [table, *blocks] if sizes.is_tied else [0, table, *blocks, table]
    plans = []
    for number, (num, tiers) in enumerate(zip(nums, tiers_of_units(nums, nums, setting), strict=True)):
        weight: Any = _Elements((num,), dtype_of("float32"))
        buffer = plan_buffer([Original(weight, "", ())], replace(setting, tiers=tiers))
        is_table = number == 1 and not sizes.is_tied
        plans.append(UnitPlan(str(number or ""), (buffer,) if num else (), not is_table))
    return plans


class TypicalModel(NamedTuple):
    """A typical model, and the tokens of a micro-batch."""

    sizes: Sizes
    num_tokens: int

    def planned(self, config: Config, setting: Setting) -> Iterator[RankUnits]:
        """Yield what each pipeline rank holds: there is one. Raises ValueError, see `plan_number`."""
        yield plan_number(self.sizes, config, setting), 0

    def usage(self, config: Config, setting: Setting) -> DryRun:
        """Return what a micro-batch takes; the operations of attention scores are left out."""
        sizes, num, tp = self.sizes, self.num_tokens, config.mesh.tp
        one = num * sizes.width * (config.precision.param_dtype or dtype_of("float32")).itemsize
        if config.mesh.sequence:
            inputs, kept = -(-one // tp), -(-one * (_WHOLE + _DIVIDED) // tp)
        else:
            inputs, kept = one, one * _WHOLE - (-one * _DIVIDED // tp)
        logits = _LOGIT * num * sizes.vocabulary
        if config.loss.tiles != "none":  # the gradient of the weight waits for the backward, in float32
            logits = min(logits * ROW_BYTES // _LOGIT, TILE_BYTES * tp) + _LOGIT * sizes.embedding
        head = 2 * inputs - (-logits // tp) if sizes.vocabulary else 0
        again = config.recompute in RECOMPUTED
        peak = sizes.depth * inputs + max(kept, head) if again else sizes.depth * kept + head
        # A sum sends 2 (tp - 1) / tp of its bytes, as a reduce-scatter and an all-gather in its place do. A
        # recomputation ends before the last sum of a block.
        sent = sizes.depth * (_EXCHANGES + again) * 2 * one * (tp - 1) // tp
        blocks = [counted(2 * block * num, kept=kept, inputs=inputs, moved=kept) for block in sizes.blocks]
        return DryRun(peak, sent, [*blocks, counted(2 * sizes.embedding * num, working=head)])
