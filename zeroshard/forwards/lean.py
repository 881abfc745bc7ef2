"""Activations inside the MLPs of transformers, computed so that the backward needs fewer tensors.

    down(act(gate) * up)    saves gate, act(gate), up and the product: now gate, up and the product
    GELU, written out       saves four tensors: now its input, in one function of torch

The backward computes act(gate) again, element by element, so the gradients of a gated MLP have the same bits.
Torch's GELU has others: it differs by the rounding of float32, 1e-6 relative.

In tiles of tokens a gated MLP keeps its input alone, and each tile is computed again in the backward, so the
wide tensors of one tile are all that is there. Autograd adds up the gradients of the weights. Source: Bekman
et al. 2025, "Arctic Long Sequence Training", section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroshard.forwards.tiled import rows_of_tile
from zeroshard.forwards.wrapped import checkpointed
from zeroshard.sharding.context import Changes

_WRITTEN_OUT = ("NewGELUActivation", "FastGELUActivation")
"""Classes of transformers that compute the tanh form of GELU by single operations."""
_WIDE = 6
"""Wide tensors of a tile in its backward: the four that are saved, and two gradients."""


def change_mlps(
    model: nn.Module, recompute: str, tiles: int | str, changes: Changes, *, is_whole: bool = True
) -> None:
    """Let gated MLPs and written-out GELUs of transformers save fewer tensors.

    With recompute="lean" they do, and with tiles gated MLPs compute in tiles of tokens. Others stay as
    they are. Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", section 5: recompute what takes much memory and little time.

    Raises:
        ValueError: there are to be tiles, and the model has no gated MLP; a pipeline rank may have none.
    """
    is_lean, found = recompute == "lean", False
    modules: Iterator[Any] = model.modules()
    for module in modules:
        is_gated, is_changed = _is_gated(type(module).forward), "forward" in vars(module)
        if is_lean and not is_changed and type(module).__name__ in _WRITTEN_OUT:
            changes.around(module, "lean", lambda _: functools.partial(F.gelu, approximate="tanh"))
        elif is_lean and not is_changed and is_gated and _is_a_function(module.act_fn):
            changes.around(module, "lean", functools.partial(_gated, module))
        if tiles != "none" and is_gated and (not is_changed or module in changes.stacks):
            changes.around(module, "tiles", functools.partial(_tiled, module, tiles))
            found = True
    if tiles != "none" and not found and is_whole:
        raise ValueError(
            "config key 'mlp.tiles': expected gated MLPs of transformers, which compute down_proj(act_fn("
            f"gate_proj(x)) * up_proj(x)), got none in {type(model).__name__}: set it to 'none'"
        )


def _tiled(mlp: Any, tiles: int | str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    again = checkpointed(mlp, forward)

    def tiled(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x)
        rows = x.reshape(-1, x.shape[-1])  # a batch of sequences, one of them, or one token
        size = rows_of_tile(len(rows), tiles, _WIDE * mlp.up_proj.out_features * x.element_size())
        output = torch.cat([again(tile) for tile in rows.split(size)])
        return output.view(*x.shape[:-1], output.shape[-1])

    return tiled


def _gated(mlp: Any, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def product(gate: Tensor, up: Tensor) -> Any:
        return mlp.act_fn(gate) * up

    def lean(x: Tensor) -> Any:
        both = mlp.gate_proj(x), mlp.up_proj(x)
        return mlp.down_proj(checkpoint(product, *both, use_reentrant=False, preserve_rng_state=False))

    return lean


def _is_a_function(act: Any) -> bool:
    """True for an activation that may be computed again: known, without randomness and edits."""
    is_known = type(act).__module__ in ("torch.nn.modules.activation", "transformers.activations")
    return is_known and not (getattr(act, "inplace", False) or isinstance(act, nn.RReLU))


def _forward(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _named_forward(self: Any, x: Any) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # noqa: RET504 - transformers writes it so


def _operations(forward: Callable[..., Any]) -> tuple[Any, ...]:
    code = forward.__code__
    return code.co_code, code.co_names, code.co_nlocals  # an argument more is a local more


_GATED = tuple(map(_operations, (_forward, _named_forward)))
"""The forwards of a gated MLP in transformers; its models have them under many names of classes."""


def _is_gated(forward: Callable[..., Any]) -> bool:
    """True if a forward is that of a gated MLP, and nothing else: the same operations of Python."""
    return hasattr(forward, "__code__") and _operations(forward) in _GATED
