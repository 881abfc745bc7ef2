"""The recorder of a model without memory: tensors go to the meta device, and it notes their operations.

It treats an operation that torch dispatches by its kind:

    makes a tensor out of nothing       the tensor is made on the meta device; recorded
    makes one on the meta device        as always: it has no values, and draws no random numbers
    computes with a deferred tensor     its output is one as well; recorded
    asks for values (item, cpu, equal)  the operations that the tensor depends on are run for the answer
    anything else                       as always
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.internals import pytree
from zeroshard.lazy.deferred import (
    Op,
    View,
    allocate,
    defer,
    deferred_of,
    has_memory,
    is_changed,
    values_in,
    values_of,
)

_META, _CPU = torch.device("meta"), torch.device("cpu")
_DEFERRED = (None, _CPU)
"""The `device=` arguments of tensors that are made on the meta device instead."""

_FILLS = frozenset(
    f"aten::{name}"
    for name in (
        *("normal_", "uniform_", "zero_", "fill_", "copy_", "random_"),
        *("exponential_", "log_normal_", "cauchy_", "geometric_"),
    )
)
"""In-place operations whose outcome does not depend on earlier values of the tensor."""

_EMPTY, _EMPTY_LIKE = torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default

_numbers = count()


class Recorder(TorchDispatchMode):
    """Records operations, below autograd.

    Args:
        draw: True draws random numbers while recording, as an ordinary init does. False gives each random
            operation a generator of its own, seeded from torch's seed, when it is run.
        adopts_meta: True gives tensors that were made on the meta device on purpose the values that are
            computed for them.
    """

    def __init__(self, draw: bool, adopts_meta: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw, self.adopts_meta = draw, adopts_meta
        self._seen: dict[int, nn.Parameter | None] = {}
        """The parameters of earlier recordings that an operation had, by id; None: changed in between."""

    @property
    def earlier(self) -> list[nn.Parameter]:
        """The parameters of earlier recordings that operations had here, unless changed in between."""
        return [parameter for parameter in self._seen.values() if parameter is not None]

    @contextmanager
    def changed(self, draw: bool, adopts_meta: bool) -> Iterator[None]:
        """Draw random numbers and adopt meta tensors, or not, for a while."""
        before = self._draw, self.adopts_meta
        self._draw, self.adopts_meta = draw, adopts_meta
        try:
            yield
        finally:
            self._draw, self.adopts_meta = before

    def takes(self, tensor: Tensor) -> bool:
        """True if the operations on a tensor are recorded."""
        return not has_memory(tensor) and (self.adopts_meta or deferred_of(tensor) is not None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        device = kwargs.get("device")
        if func is _EMPTY_LIKE and device == _CPU and not has_memory(tensors[0]):  # to_empty()
            like = func(*args, **kwargs | {"device": _META})
            func, args, tensors = _EMPTY, (like.shape, like.stride()), []
            kwargs = {"dtype": like.dtype, "device": _CPU}
        is_wanted = device in _DEFERRED or (self.adopts_meta and device == _META)
        is_made = not tensors and _has_device(func) and is_wanted
        if not is_made and not any(map(self.takes, tensors)):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        is_asked = not _returns_tensors(func) or (tensors and device not in (None, _META))
        if is_asked or any(map(has_memory, written)):
            real_args, real_kwargs = values_in((args, kwargs))
            return func(*real_args, **real_kwargs)
        if is_made or device is not None:
            kwargs["device"] = _CPU
        return self._record(func, args, kwargs, written)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]) -> Any:
        inputs = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        deferred = {id(t): deferred_of(t) or defer(t) for t in inputs if not has_memory(t)}
        for tensor in inputs:
            if isinstance(tensor, nn.Parameter) and hasattr(tensor, "recorded_version"):
                self._seen.setdefault(id(tensor), None if is_changed(tensor) else tensor)
        # Geometry as it is before: t_() and its like change it.
        run_args, run_kwargs = pytree.tree_map_only(
            Tensor,
            lambda t: t.clone() if has_memory(t) else View.of(t, deferred[id(t)]),
            (args, kwargs | ({"generator": None} if "generator" in kwargs else {})),
        )
        fills = func._schema.name in _FILLS and View.of(args[0], deferred[id(args[0])]).is_whole
        overwrites = {deferred[id(args[0])]} if fills else set()
        number, state = next(_numbers), None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = self._random_state(func, args, kwargs, number, blank=args[0] if fills else None)
        outputs = _run_on_meta(func, args, kwargs)
        creates = {}
        for place, output in enumerate(pytree.tree_leaves(outputs)):
            if isinstance(output, Tensor) and deferred_of(output) is None:
                creates[place] = View.of(output, defer(output))
        made = {view.deferred for view in creates.values()}
        op = Op(
            number=number,
            call=func,
            args=run_args,
            kwargs=run_kwargs,
            creates=creates,
            reads=frozenset(deferred.values()) - overwrites,
            overwrites=frozenset(overwrites | made),
            default_dtype=torch.get_default_dtype(),
            rng_state=state,
        )
        for target in made | {deferred[id(tensor)] for tensor in written}:
            target.ops.append(op)
        return outputs

    def _random_state(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, blank: Tensor | None
    ) -> Tensor:
        """Return the generator's state for an operation, and advance the generator as the operation would."""
        if not self._draw:
            seed = (torch.initial_seed() + number) % (1 << 63)
            return torch.Generator().manual_seed(seed).get_state()
        generator = kwargs.get("generator") or torch.default_generator
        state = generator.get_state()

        def real(tensor: Tensor) -> Tensor:
            if tensor is not blank:
                return values_of(tensor)
            deferred = deferred_of(tensor)
            assert deferred is not None, "what is recorded is deferred"
            return View.of(tensor, deferred).over(allocate(deferred.num_bytes).untyped_storage())

        real_args, real_kwargs = pytree.tree_map_only(Tensor, real, (args, kwargs))
        func(*real_args, **real_kwargs)
        return state


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the meta device; tensors that it writes to are changed in place."""
    if "generator" in kwargs:
        kwargs = kwargs | {"generator": None}
    if "device" in kwargs:
        kwargs = kwargs | {"device": _META}
    try:
        meta_args, meta_kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(_META), (args, kwargs))
        return func(*meta_args, **meta_kwargs)
    except NotImplementedError:  # the shape depends on the values
        real_args, real_kwargs = values_in((args, kwargs | ({"device": _CPU} if "device" in kwargs else {})))
        return pytree.tree_map_only(Tensor, lambda t: t.to(_META), func(*real_args, **real_kwargs))


def _has_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _returns_tensors(func: Any) -> bool:
    return any("Tensor" in str(returned.type) for returned in func._schema.returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes."""
    values = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]
