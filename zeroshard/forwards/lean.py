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

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zeroshard.config.sections import Config
from zeroshard.forwards.tiled import TILE_BYTES
from zeroshard.forwards.wrapped import checkpointed
from zeroshard.sharding.context import Changes

_GATED = "self.down_proj(self.act_fn(self.gate_proj({0})) * self.up_proj({0}))"
"""The forward of a gated MLP in transformers; its models have it under many names of classes."""
_WRITTEN_OUT = ("NewGELUActivation", "FastGELUActivation")
"""Classes of transformers that compute the tanh form of GELU by single operations."""
_WIDE = 6
"""Wide tensors of a tile in its backward: the four that are saved, and two gradients."""


class _Product(torch.autograd.Function):
    """act(gate) * up; the backward computes act(gate) again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return act(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            again = gate.detach().requires_grad_()
            activated = ctx.act(again)
        (of_gate,) = torch.autograd.grad(activated, again, gradient * up)
        return of_gate, gradient * activated.detach(), None


def lean_forwards(model: nn.Module, changes: Changes) -> None:
    """Let gated MLPs and written-out GELUs of transformers save fewer tensors; others stay as they are.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
    5: recompute what takes much memory and little time.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if "forward" in vars(module):  # somebody has set another one
            continue
        if type(module).__name__ in _WRITTEN_OUT:
            changes.around(module, "lean", lambda _: functools.partial(F.gelu, approximate="tanh"))
        elif _is_gated(type(module).forward) and _is_a_function(module.act_fn):
            changes.around(module, "lean", functools.partial(_gated, module))


def tile_mlps(model: nn.Module, config: Config, changes: Changes) -> None:
    """Let gated MLPs of transformers compute in tiles of tokens, if the config says so.

    Raises:
        ValueError: the model has none; a pipeline rank may have none.
    """
    tiles = config.mlp.tiles
    if tiles == "none":
        return
    found: list[Any] = []
    for module in model.modules():
        is_patched = "forward" in vars(module) and module not in changes.stacks
        if not is_patched and _is_gated(type(module).forward):
            found.append(module)
    for mlp in found:
        changes.around(mlp, "tiles", functools.partial(_tiled, mlp, tiles))
    if not found and config.mesh.pp == 1:
        raise ValueError(
            "config key 'mlp.tiles': expected gated MLPs of transformers, which compute "
            f"{_GATED.format('x')}, got none in {type(model).__name__}: set it to 'none'"
        )


def _tiled(mlp: Any, tiles: int | str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    again = checkpointed(mlp, forward)

    def tiled(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x)
        rows = x.reshape(-1, x.shape[-1])  # a batch of sequences, one of them, or one token
        if isinstance(tiles, int):
            size = -(-len(rows) // tiles)
        else:
            size = TILE_BYTES // (_WIDE * mlp.up_proj.out_features * x.element_size())
        output = torch.cat([again(tile) for tile in rows.split(max(1, size))])
        return output.view(*x.shape[:-1], output.shape[-1])

    return tiled


def _gated(mlp: Any, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def lean(x: Tensor) -> Tensor:
        output: Tensor = mlp.down_proj(_Product.apply(mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn))
        return output

    return lean


def _is_a_function(act: Any) -> bool:
    """True for an activation that may be computed again: without parameters, hooks, randomness and edits."""
    is_known = type(act).__module__ in ("torch.nn.modules.activation", "transformers.activations")
    has_parts = any(True for _ in act.parameters()) or any(True for _ in act.children())
    is_watched = act._forward_hooks or act._forward_pre_hooks or "forward" in vars(act)
    is_pure = not (getattr(act, "inplace", False) or isinstance(act, nn.RReLU))
    return is_known and is_pure and not has_parts and not is_watched


@functools.cache
def _is_gated(forward: Callable[..., Any]) -> bool:
    """True if a forward is that of a gated MLP, and nothing else."""
    if "down_proj" not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return False
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except OSError:  # made without a file
        return False
    match function:
        case ast.FunctionDef(
            args=ast.arguments(args=[_, ast.arg(arg=given)]),
            body=[ast.Return(value=ast.expr() as value)]
            | [ast.Assign(targets=[ast.Name()], value=value), ast.Return(value=ast.Name())],
        ):
            return ast.unparse(value) == _GATED.format(given)
    return False
