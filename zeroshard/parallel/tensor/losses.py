"""Embeddings, and losses over logits, that are divided over the tensor ranks by the vocabulary.

    head --> [N, classes / ranks] --> three numbers for each row are exchanged --> loss, the same on all ranks

Each rank has the rows of a range of tokens, and computes the logits of that range: in models of transformers,
and in a loop of the user. To gather the logits would exchange `classes` numbers for each row, and every rank
would hold all of them.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zeroshard.config.sections import ROW_BYTES
from zeroshard.forwards.tiled import Row, RowLoss, TiledLoss, rows_of_tile
from zeroshard.parallel.pipeline.chunked import Absent
from zeroshard.parallel.tensor.sequence import Activations, Comm, Sum, add_up, copied, move
from zeroshard.parallel.tensor.styles import Divided, Split
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.plan.layout import Span
from zeroshard.plan.units import UnitSpec
from zeroshard.sharding.context import Changes


def embed(
    tokens: Tensor,
    look_up: Callable[[Tensor], Tensor],
    own: Span,
    over: Activations,
    label: str,
    add: Sum = add_up,
) -> Tensor:
    """Look up tokens in a table whose rows are divided over the ranks.

    Args:
        tokens: any shape, integers in [0, vocabulary); the same on all ranks.
        look_up: finds rows of this rank, counted from its first one: [*tokens.shape] -> [*tokens.shape, d].
        own: the tokens of these rows.
        over: the exchanges of the tensor ranks.
        label: the name of the layer, for messages.
        add: adds up what the ranks have found.

    Returns:
        [*tokens.shape, d], the same on all ranks; or what `add` gives.
    """
    num, is_unknown = own.size * over.size, (tokens < 0) | (tokens >= own.size * over.size)
    if tokens.device.type == "cpu" and is_unknown.any():
        raise IndexError(f"'{label}': expected tokens in [0, {num}), got {tokens[is_unknown][0].item()}")
    is_elsewhere = (tokens < own.start) | (tokens >= own.stop)
    found = look_up((tokens - own.start).masked_fill(is_elsewhere, 0))
    if tokens.device.type != "cpu":  # where the host would have to wait for an error
        found = found.masked_fill(is_unknown.unsqueeze(-1), math.nan)
        is_elsewhere &= ~is_unknown
    return add(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), over, label)


class _RowLosses(torch.autograd.Function):
    """[N]: the losses of rows, and 0 for rows that do not count."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, counts: Tensor, loss: RowLoss) -> Tensor:
        losses, row = loss.losses(logits, targets, counts)
        ctx.loss = loss
        ctx.save_for_backward(logits, *row)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, *row = ctx.saved_tensors
        return ctx.loss.gradient(logits, Row(*row), gradient), None, None, None


_CLASSES = "_classes_of_rank"
"""The attribute of a divided head."""


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a rank."""

    own: Span
    over: Activations
    label: str
    """The name of the head."""

    @property
    def num(self) -> int:
        """The classes of all ranks."""
        return self.own.size * self.over.size

    def gather(self, part: Tensor) -> Tensor:
        """Return all logits: [..., own classes] -> [..., classes]."""
        return move(part, Comm.GATHER, self.over, self.label)

    def row_loss(self, smoothing: float = 0.0, z_loss: float = 0.0) -> RowLoss:
        """The loss of rows of logits over all of them."""
        gather = functools.partial(self.over.gather, dim=0, label="sums of logits")
        return RowLoss(self.own, self.num, smoothing, z_loss, gather)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    head: nn.Module,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of `torch.nn.functional.cross_entropy` over the logits of a head that may be divided.

    For divided logits, ranks exchange three numbers for each row: the largest logit of each rank, its sum of
    exponentials, and the logit of the target; with smoothing, the sum of logits too.

    Args:
        logits: [..., classes of this rank], the output of the head; all classes if it is not divided. The
            loss is computed at least in float32.
        targets: [...], integers in [0, classes) or `ignore_index`; the same on all ranks.
        head: the layer that gave the logits, such as `engine.module.head`; 'colwise' in the plan.
        ignore_index: the target of rows that do not count.
        reduction: "mean" over the rows that count, "sum" or "none".
        label_smoothing: the part of a target that all classes share, in [0, 1].

    Returns:
        0-dim, or [...] for "none"; the same on all tensor ranks. On an accelerator the divided loss of a
        target that is no class is not a number: an error would make the host wait.

    Raises:
        ValueError: targets of another shape, or that are no integers; logits that were gathered; another
            reduction or smoothing.
        IndexError: a target is no class.
    """
    _check(logits, targets, label_smoothing, reduction, "mean", "sum", "none")
    wide, flat = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2), targets.flatten()
    classes: Classes | None = vars(head).get(_CLASSES)
    if classes is None:
        whole = F.cross_entropy(
            wide, flat, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
        return whole.view(targets.shape) if reduction == "none" else whole
    if wide.shape[-1] != classes.own.size:
        raise ValueError(
            f"logits: expected {classes.own.size} classes, this rank's part of {classes.num} of "
            f"'{classes.label}', got {wide.shape[-1]}; a plan with 'colwise' for this layer gives a part"
        )
    counts = flat != ignore_index
    is_none = counts & ((flat < 0) | (flat >= classes.num))
    if flat.device.type == "cpu" and is_none.any():
        wrong = int(flat[is_none][0])
        raise IndexError(f"expected targets in [0, {classes.num}) or {ignore_index}, got {wrong}")
    losses: Tensor = _RowLosses.apply(wide, flat, counts, classes.row_loss(label_smoothing))
    losses = losses.masked_fill(is_none, torch.nan)
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


def tiled_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    head: nn.Module,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    tiles: int | str = "auto",
) -> Tensor:
    """Return the cross-entropy of the logits of a head, tile by tile: they are never all there.

    Call it in the forward of the model, in the place of the head. Gradients are computed in the forward, too.
    The gradient of the weight is added up in float32.

    Args:
        hidden: [..., d], the input of the head.
        targets: [...], integers in [0, classes) or `ignore_index`.
        head: the `nn.Linear` that gives the logits, in the unit whose forward calls this: in the root, that
            is in no block. Over tensor ranks 'colwise' in the plan.
        ignore_index: the target of rows that do not count.
        reduction: "mean" over the rows that count, or "sum".
        label_smoothing: the part of a target that all classes share, in [0, 1].
        z_loss: the factor of the square of log(sum(exp(logits))) in the loss of a row.
        tiles: the number of tiles; "auto": as few as keep the logits of one within 256 MB.

    Returns:
        0-dim, at least float32; not a number if a target is no class.

    Raises:
        ValueError: targets of another shape, or that are no integers; another head, reduction or smoothing.
    """
    _check(hidden, targets, label_smoothing, reduction, "mean", "sum")
    if type(head) is not nn.Linear or isinstance(head.weight, ShardedParameter):
        raise ValueError(
            "head: expected an nn.Linear without an adapter, that is no unit of its own: name the class of "
            f"the blocks in units=; got {type(head).__name__}"
        )
    classes: Classes | None = vars(head).get(_CLASSES)
    if classes is None:
        if len(head.weight) != head.out_features:
            raise ValueError("head: expected 'colwise' in tp_plan, got a head whose output is gathered")
        loss = RowLoss(Span(0, head.out_features), head.out_features, label_smoothing, z_loss)
    else:
        loss, hidden = classes.row_loss(label_smoothing, z_loss), copied(hidden, classes.over, classes.label)
    kind, weight, flat = hidden.device.type, head.weight, targets.flatten().long()
    is_cast = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_cast else weight.dtype
    leaves = [hidden.reshape(-1, hidden.shape[-1]), weight, head._parameters["bias"]]
    if not torch.is_grad_enabled():  # a Function takes gradients of all that may need them
        leaves = [None if one is None else one.detach() for one in leaves]
    leaves = [None if one is None else one.to(dtype) for one in leaves]
    counts, size = flat != ignore_index, rows_of_tile(len(flat), tiles, ROW_BYTES * len(weight))
    total: Tensor = TiledLoss.apply(*leaves, flat, counts, loss, size)
    is_none = counts & ((flat < 0) | (flat >= loss.num))
    total, num = total.masked_fill(is_none.any(), torch.nan), counts.sum()
    if reduction == "sum":
        return total
    # As in torch, the mean of no rows is no number, and its gradients are 0.
    return (total / num.clamp(min=1)).masked_fill(num == 0, torch.nan)


def _check(values: Tensor, targets: Tensor, smoothing: float, reduction: str, *reductions: str) -> None:
    if targets.is_floating_point() or targets.shape != values.shape[:-1]:
        raise ValueError(
            f"targets: expected integers of shape {list(values.shape[:-1])}, got {targets.dtype} of shape "
            f"{list(targets.shape)}"
        )
    if reduction not in reductions:
        *others, last = map(repr, reductions)
        raise ValueError(f"reduction: expected {', '.join(others)} or {last}, got {reduction!r}")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing: expected a number in [0, 1], got {smoothing}")


def with_loss(layer: Divided, model: nn.Module) -> Divided:
    """Have a model of transformers compute its loss of divided logits, if this is its head."""
    if layer.style.way is not Split.COLUMNS_GATHERED or causal_model(model, layer.module) is None:
        return layer
    return replace(layer, style=replace(layer.style, way=Split.COLUMNS_LOSS))


def divide_losses(model: nn.Module, layers: Iterable[Divided], over: Activations, changes: Changes) -> None:
    """Let losses be computed of the outputs that a rank has.

    Raises:
        ValueError: 'colwise_loss' stands for another layer than the head of such a model.
    """
    for layer in layers:
        if layer.style.way not in (Split.COLUMNS, Split.COLUMNS_LOSS):
            continue
        own, *others = layer.cuts["weight"].spans(over.rank)
        classes = Classes(own, over, layer.name)
        if not others:
            changes.set(layer.module, _CLASSES, classes)
        if layer.style.way is Split.COLUMNS_LOSS:
            owner = causal_model(model, layer.module)
            if owner is None:
                raise ValueError(
                    "tp_plan: 'colwise_loss': expected the head of a causal language model of transformers "
                    f"with its default loss, got '{layer.name}' of {type(model).__name__}"
                )
            ModelLoss(owner, classes, layer.module, changes)


class DividedLogits:
    """Logits in the output of a model; each tensor rank has some tokens' logits. No tensor: `gather()` is.

    A part that looks like all logits would give wrong tokens without an error. To gather them only where they
    are used would wait forever if not all ranks use them.
    """

    def __init__(self, part: Tensor, classes: Classes) -> None:
        self.part = part
        """[..., classes of this rank]."""
        self._classes = classes

    def gather(self) -> Tensor:
        """Return all logits, [..., classes], on each rank; all tensor ranks call it."""
        return self._classes.gather(self.part)

    def __repr__(self) -> str:
        return f"DividedLogits({list(self.part.shape)} of {self._classes.num} classes)"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no attribute {name!r}: {_REFUSAL}")

    @classmethod
    def _refuse(cls, *_: Any) -> NoReturn:
        raise TypeError(_REFUSAL)

    __torch_function__ = _refuse
    __getitem__ = __len__ = __bool__ = __iter__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __matmul__ = _refuse


_REFUSAL = (
    "the logits of a model that computes its loss in training are divided over the tensor-parallel ranks: "
    "call outputs.logits.gather() on all of them, or give a tp_plan with 'colwise_gather_output' for the head"
)


class ModelLoss:
    """The loss of a causal language model of transformers, over divided logits, or in tiles.

    That is in training with labels. Without labels, and in evaluation, the head gives all logits as before.
    The output of a model with tiles has None for its logits.

    Args:
        model: the model; the loss of transformers is what its `loss_function` gives. It gets this one.
        classes: the classes of this rank; None if the head is not divided.
        head: the head of the model.
        changes: the changes of the model.
    """

    def __init__(self, model: Any, classes: Classes | None, head: nn.Module, changes: Changes) -> None:
        self._classes, self._computing_head = classes, head
        self._whole: Callable[..., Tensor] = model.loss_function
        self.tiles: int | str = "none"
        """See `tiled_cross_entropy`; "none" for no tiles."""
        self._is_own = self._was_called = False
        self._hidden: tuple[Tensor, int] | None = None
        """The input of the head in a forward with tiles, and its version."""
        changes.around(head, "loss", lambda forward: functools.partial(self._head, forward))
        changes.set(model, "_loss_function", self)
        changes.hook(
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
            model.register_forward_hook(self._at_last, always_call=True),
        )

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Return the loss as `ForCausalLMLoss` of transformers defines it, in float32."""
        self._was_called = True
        given = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
        if not self._is_own:
            return self._whole(logits, labels, vocab_size, shift_labels=shift_labels, **given, **others)
        head: Any = self._computing_head
        num = head.out_features if self._classes is None else self._classes.num
        if vocab_size != num:
            raise ValueError(f"expected a loss over the {num} tokens of the head, got {vocab_size}")
        if shift_labels is None:
            assert labels is not None, "it is called with one of them"
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.to(logits.device).reshape(logits.shape[:-1])
        reduction = "mean" if num_items_in_batch is None else "sum"
        options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        if self.tiles == "none":
            total = cross_entropy(logits.float(), targets, head, **options)
        elif self._hidden is None or logits is not self._hidden[0] or logits._version != self._hidden[1]:
            raise ValueError(
                "loss.tiles: the model changes its logits between its head and its loss; expected 'none', or "
                "zeroshard.tiled_cross_entropy in its forward"
            )
        else:
            total = tiled_cross_entropy(logits, targets, head, tiles=self.tiles, **options)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total if num_items_in_batch is None else total / num_items_in_batch

    def _head(self, forward: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        if self._is_own and self.tiles != "none":
            self._hidden = value, value._version
            return value
        part = forward(value)
        return part if self._is_own or self._classes is None else self._classes.gather(part)

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        # Labels by their place leave logits whole.
        self._is_own = model.training and kwargs.get("labels") is not None
        self._was_called = False

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        if not self._is_own:
            return output
        if not self._was_called:
            raise RuntimeError(
                f"{type(model).__name__} did not call its loss_function for labels in training, so its loss "
                "is not over all logits: set loss.tiles to 'none'; with mesh.tp, give a tp_plan with "
                "'colwise_gather_output' for the head"
            )
        if isinstance(output, Mapping):
            output["logits"] = self._shown(output["logits"])  # type: ignore[index]
            return output
        loss, logits, *rest = output
        return loss, self._shown(logits), *rest

    def _shown(self, logits: Tensor) -> DividedLogits | None:
        """What the output of the model has in the place of the logits."""
        if self._classes is None or self.tiles != "none":
            return None
        return DividedLogits(logits, self._classes)

    def _at_last(self, model: nn.Module, args: Any, output: Any) -> None:
        self._is_own, self._hidden = False, None


def tile_losses(
    model: nn.Module, specs: Sequence[UnitSpec], tiles: int | str, changes: Changes, *, is_divided: bool
) -> None:
    """Let a causal language model of transformers compute its loss in tiles, unless these are "none".

    Raises:
        ValueError: it is another model; or its head is a unit, an adapter, or divided in another way.
    """
    if tiles == "none":
        return
    units, found = {part for spec in specs[1:] for part in spec.module.modules()}, False
    for owner, head in _models_with_heads(model):
        if isinstance(head, Absent):  # another pipeline rank has it
            return
        loss, is_patched = vars(owner).get("_loss_function"), "forward" in vars(head)
        if type(head) is not nn.Linear or (is_patched and head not in changes.stacks) or head in units:
            continue
        if not is_divided and causal_model(owner, head) is owner:
            loss = ModelLoss(owner, None, head, changes)
        if isinstance(loss, ModelLoss):  # else its head is not divided
            loss.tiles, found = tiles, True
    if not found:
        raise ValueError(
            "config key 'loss.tiles': expected a causal language model of transformers with its default loss "
            "and a plain nn.Linear as its head, which is no unit of its own and divided, if at all, as "
            f"'colwise_loss'; for {type(model).__name__} set it to 'none', and call "
            "zeroshard.tiled_cross_entropy in the forward"
        )


def causal_model(root: nn.Module, head: nn.Module) -> nn.Module | None:
    """Return the model of transformers that computes the loss of causal language models over a head.

    Wrappers that hand on the attributes of a model are left out, and models that compute their loss without
    `loss_function`, as T5 does.
    """
    for owner, own in _models_with_heads(root):
        code = getattr(inspect.unwrap(type(owner).forward), "__code__", None)
        calls_it = code is not None and "loss_function" in code.co_names
        name = getattr(getattr(owner, "loss_function", None), "__name__", "")
        if own is head and calls_it and name == "ForCausalLMLoss":
            return owner
    return None


def _models_with_heads(root: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    for module in root.modules():
        get: Any = hasattr(type(module), "get_output_embeddings") and module.get_output_embeddings
        if get and (head := get()) is not None:
            yield module, head
