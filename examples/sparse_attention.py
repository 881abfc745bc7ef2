"""Attention of fixed patterns (Child et al. 2019) and BigBird (Zaheer et al. 2020) in models of transformers.

    torchrun --nproc-per-node 2 examples/sparse_attention.py --pattern bigbird --steps 20 --stage 3

`register()` makes a pattern an attention of transformers, which `model.set_attn_implementation("bigbird")`
chooses. It is computed by torch's `flex_attention`, which leaves out blocks that a pattern has not.
It refuses inputs with gradients on CPUs: there gradients are those of dense attention with the pattern as a
boolean mask. A model that was trained with dense attention gets worse under a pattern.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM

import zeroshard
from llama import parser, small_llama


@dataclass(frozen=True)
class Fixed:
    """Each token sees its own stretch, and the last `summaries` tokens of each stretch (section 4.2)."""

    stride: int = 64
    summaries: int = 1
    block: int = 64
    """Tokens of a block that flex_attention computes or leaves out, 16 or more on GPUs."""

    def mask_of(self, num_heads: int, length: int, device: torch.device) -> Any:
        """(batch, head, query, key) -> True where a query sees a key."""

        def sees(_: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            is_near = query // self.stride == key // self.stride
            return is_near | (key % self.stride >= self.stride - self.summaries)

        return sees


@dataclass(frozen=True)
class BigBird:
    """A window of blocks, random blocks, drawn for each head, and the first and last block for all."""

    block: int = 64
    window: int = 3
    random: int = 3
    seed: int = 0

    def blocks(self, num_heads: int, num: int) -> Tensor:
        """[num_heads, num, num], bool: the blocks of keys that each block of queries sees."""
        row, column = torch.arange(num)[:, None], torch.arange(num)
        ends = torch.tensor([0, num - 1])
        common = (row - column).abs() <= self.window // 2
        common = common | torch.isin(row, ends) | torch.isin(column, ends)
        generator = torch.Generator().manual_seed(self.seed)
        draws = torch.rand(num_heads, num, num, generator=generator).masked_fill(common, -1.0)
        chosen = draws.topk(min(self.random, num), -1)
        drawn = torch.zeros_like(draws).scatter(-1, chosen.indices, (chosen.values >= 0).float()).bool()
        return drawn | common

    def mask_of(self, num_heads: int, length: int, device: torch.device) -> Any:
        """As of `Fixed`."""
        table = self.blocks(num_heads, -(-length // self.block)).to(device)

        def sees(_: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return table[head, query // self.block, key // self.block]

        return sees


Pattern = Fixed | BigBird


def _kept(make: Any) -> Any:
    """Keep what a function makes; outside of an inference mode, as a later backward may save it."""
    return functools.lru_cache(maxsize=8)(torch.inference_mode(False)(make))


@_kept
def mask_mod(pattern: Pattern, num_heads: int, length: int, device: torch.device, is_causal: bool) -> Any:
    """A pattern as flex_attention takes it; a causal model sees no later token either."""
    sees = pattern.mask_of(num_heads, length, device)
    if not is_causal:
        return sees
    return lambda batch, head, query, key: sees(batch, head, query, key) & (query >= key)


@_kept
def block_mask(
    pattern: Pattern, num_heads: int, length: int, device: torch.device, is_causal: bool
) -> BlockMask:
    mask, is_fast = mask_mod(pattern, num_heads, length, device, is_causal), device.type == "cuda"
    size = {"BLOCK_SIZE": pattern.block, "_compile": is_fast}  # else it makes all scores at once
    return create_block_mask(mask, None, num_heads, length, length, device=device, **size)


@_kept
def dense_mask(
    pattern: Pattern, num_heads: int, length: int, device: torch.device, is_causal: bool
) -> Tensor:
    """[1, num_heads, length, length], bool."""
    mask = mask_mod(pattern, num_heads, length, device, is_causal)
    return create_mask(mask, None, num_heads, length, length, device=device)


compiled = functools.cache(lambda: torch.compile(flex_attention))


def attend(
    pattern: Pattern, query: Tensor, key: Tensor, value: Tensor, scale: float | None, is_causal: bool
) -> Tensor:
    """[batch, heads, length, head size]; keys and values may have fewer heads."""
    where = query.shape[1], query.shape[2], query.device, is_causal
    inputs, options = (query, key, value), {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    kernel: Any = flex_attention if query.is_cpu else compiled()
    flex = functools.partial(kernel, block_mask=block_mask(pattern, *where), **options)
    if not query.is_cpu or not any(one.requires_grad for one in inputs):
        return flex(*inputs)
    dense = F.scaled_dot_product_attention(*inputs, dense_mask(pattern, *where), **options)
    return flex(*(one.detach() for one in inputs)) + (dense - dense.detach())  # 0, with a gradient


def register(name: str, pattern: Pattern) -> None:
    """Make a pattern an attention of transformers, by a name."""

    def refuse_masks(*_: Any, attention_mask: Tensor | None = None, **options: Any) -> None:
        is_plain = options.get("allow_is_causal_skip", True)  # False for packed sequences
        if not is_plain or (attention_mask is not None and not bool(attention_mask.all())):
            raise ValueError(f"{name}: expected batches without padding, of whole sequences")

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        if attention_mask is not None or key.shape[2] != query.shape[2]:
            raise ValueError(f"{name}: expected batches without padding, and use_cache=False")
        given = map(options.get, ("dropout", "softcap", "s_aux", "sliding_window"))
        if any(isinstance(one, Tensor) or one for one in given):
            raise ValueError(f"{name}: expected no dropout, softcap, s_aux or sliding_window")
        out = attend(pattern, query, key, value, options.get("scaling"), getattr(module, "is_causal", False))
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, refuse_masks)


def build(pattern: str) -> LlamaForCausalLM:
    register("fixed", Fixed(stride=16, block=16))
    register("bigbird", BigBird(block=16, random=1))
    model = small_llama()
    model.config.use_cache = False
    model.set_attn_implementation(pattern)
    return model


def main() -> None:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--pattern", default="bigbird", choices=["fixed", "bigbird"])
    args = options.parse_args()
    model = build(args.pattern)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = zeroshard.initialize(model, optimizer, {"stage": args.stage}).engine
    generator = torch.Generator().manual_seed(engine.dp_rank)
    for step in range(args.steps):
        span = torch.randint(0, 16, (4, 8), generator=generator)
        tokens = span.repeat(1, 16).to(engine.device)  # all but the first span can be copied
        out = engine(input_ids=tokens, labels=tokens)
        engine.backward(out.loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1}: loss {out.loss.item():.3f}")
    engine.close()


if __name__ == "__main__":
    main()
