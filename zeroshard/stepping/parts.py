"""Steps of an optimizer over parts of its parameters: fetch, step, write back.

A *home* is a place of main parameters and gradients in which the optimizer cannot step them. The home fetches
a part of them, the optimizer steps the part, and the home writes the values back. So the fetched values take
the memory of one part, the trained parameters of a unit. After an exception the parts before it have had
their step.

A large parameter is stepped in pieces, because memory of its size would be too large:

    part       the parameters of one unit or less, or one large parameter
    piece      a range of its slice: step, step, ... on the device that steps
    at rest    tensors on the host or over files, before and after

For each piece the optimizer sees the same parameter with fewer elements: ranges of its values, gradient and
states. Counters and other states without elements have their values of before the step for each piece. So an
optimizer that steps each element by itself gives the same bits as in one step. Pieces are moved by the home
of farther tiers (see `stored.py`).

A twin of the optimizer steps a part of its parameters, while others may look at the optimizer. The twin has
the states, the options and the class of its optimizer, and parameter groups of its own. So `param_groups` and
hooks of the optimizer stay as they are. Optimizers for which `is_known` keep
nothing of a step but the states: nothing else is to come back from the twin.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MethodType
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm.mesh import Axes
from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.warn import warn_user
from zeroshard.parameters.sharded import ShardedParameter, gradient_of, only_sharded, set_gradients
from zeroshard.parameters.state import ModuleState, Moment
from zeroshard.plan import pieces
from zeroshard.plan.layout import BLOCK, Span
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.gradients import Gradients
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit
from zeroshard.stepping.late import own_states
from zeroshard.stepping.norms import UsesNorms
from zeroshard.stepping.wholes import UsesWholes

Groups = list[list[ShardedParameter]]
"""Parameters by the groups of their optimizer."""

_OTHERS = -1
"""The number of the part of parameters that are in no unit."""


class Home:
    """A place of parameters, which fetches them for the step of an optimizer; this one leaves them alone."""

    def expect(
        self, parts: Sequence[Sequence[ShardedParameter]], gradients: Mapping[ShardedParameter, Tensor]
    ) -> None:
        """Prepare for parts that are likely to be fetched next.

        Args:
            parts: the parameters of each, in their order.
            gradients: the gradients with which they will be stepped, as far as they are there.
        """

    def num_pieces(self, parameters: Sequence[ShardedParameter]) -> int:
        """Return the number of pieces in which a part is stepped."""
        return 1

    def fetched(
        self, stepped: Optimizer, parameters: Sequence[ShardedParameter], number: int
    ) -> AbstractContextManager[None]:
        """Hold values and gradients of a part where the optimizer can step them.

        At the end of the context the values are written back, unless an exception ends it.

        Args:
            stepped: the optimizer that steps the part, or a twin of it, which may get states of its own.
            parameters: the parameters of the part.
            number: the number of the piece, if the part is stepped in pieces.
        """
        return nullcontext()

    def end_step(self) -> None:
        """Note that all parts of a step are written back, or will be."""

    def wait(self) -> None:
        """Let the host wait until they are at rest."""


def pieces_of(buffer: FlatBuffer, indices: range) -> Sequence[Span | None]:
    """Return the pieces of a part that is one large parameter; else [None]."""
    if len(indices) > 1:
        return [None]
    cuts = pieces.cut(buffer.sharded_span(indices[0]).size, pieces.most_elements(buffer.plan))
    return cuts if len(cuts) > 1 else [None]


def show(p: ShardedParameter, values: Tensor, gradient: Tensor | None) -> None:
    """Let a parameter show other values, with a gradient of their size."""
    set_gradients([(p, None)])  # torch wants one of the same shape
    with past_guards():
        p.data = values
    set_gradients([(p, gradient)])


def per_element(value: Any, size: int) -> int | None:
    """The last dimension of a state with a value for each element or block of a slice; None for others."""
    if not isinstance(value, Tensor) or not value.dim() or not value.numel():
        return None
    length = value.shape[-1]
    return length if length in (size, -(-size // BLOCK)) else None


def part_of(whole: Tensor, piece: Span, size: int) -> Tensor:
    """The part of a state that belongs to a piece."""
    ratio = 1 if whole.shape[-1] == size else BLOCK
    return whole[..., piece.start // ratio : -(-piece.stop // ratio)]


class StepByParts:
    """The steps of an optimizer part by part, whoever takes them. Its hooks run once a step, and see no home.

    Args:
        optimizer: an optimizer over sharded parameters.
        units: lists of parameters that are fetched together; none if the optimizer steps all at once.
        homes: the homes that they pass on the way to the optimizer, the farthest one first.
        state: the state of the module, whose `steps` may let parts wait for a forward; None: no part waits.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Sequence[Sequence[ShardedParameter]],
        homes: Sequence[Home],
        state: ModuleState | None = None,
    ) -> None:
        self._state = state or ModuleState()
        self._unit_of = {p: number for number, unit in enumerate(units) for p in unit}
        self._ahead: list[list[ShardedParameter]] = []
        """The parts that were stepped ahead of others since the last `begin_units`."""
        self._num_ahead = 0
        """As many of them belong to the step that comes."""
        self._homes = tuple(homes)
        # Below torch's hooks, which are to run once.
        self._own_step = inspect.unwrap(
            type(optimizer).step, stop=lambda function: not hasattr(function, "hooked")
        )

        @functools.wraps(optimizer.step)  # with the mark of an LR scheduler that has wrapped it
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            """Call the closure once, then step each part; return the loss of the closure, or None."""
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what such a scheduler looks at
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step(optimizer)
            return loss

        hooked = Optimizer.profile_hook_step(step)
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]

    def _step(self, optimizer: Optimizer) -> None:
        """Step all parameters that have a gradient."""
        units, waiting = self._unit_of, self._state.steps
        divided = _divide(optimizer, units, lambda p: p not in units or gradient_of(p) is not None)
        work = [
            (groups, [p for group in groups for p in only_sharded(group) if gradient_of(p) is not None])
            for groups in divided
        ]
        waiting.prepare(optimizer, work)  # before twins share the states
        gradients = {p: g for _, part in work for p in part if (g := gradient_of(p)) is not None}
        for home in self._homes:
            home.expect([part for _, part in work], gradients)
        twins = ((twin_of(optimizer, groups) if units else optimizer, part) for groups, part in work)
        steps = [(part, functools.partial(self._step_part, twin, part)) for twin, part in twins]
        num_ahead, self._num_ahead = self._num_ahead, 0
        if num_ahead or not waiting.step_later(steps, self._end_step, self.wait):
            for _, step in steps:
                step()
            self._end_step()
            self.wait_later()

    def _end_step(self) -> None:
        for home in self._homes:
            home.end_step()

    def wait(self) -> None:
        """Let the host wait until stepped values are at rest."""
        for home in self._homes:
            home.wait()

    def wait_later(self) -> None:
        """Let the host wait when somebody looks, or now if that might not be seen."""
        if not self._state.steps.wait_later(self.wait):
            self.wait()

    def begin_units(self) -> None:
        """Begin to step units ahead of others, probably the same as the last time, in the same order."""
        expected, self._ahead = self._ahead, []
        for home in self._homes:
            home.expect(expected, {})

    def step_units(
        self, optimizer: Optimizer, parameters: Collection[ShardedParameter], reduced: Sequence[Gradients]
    ) -> None:
        """Step some units ahead of the others.

        Args:
            optimizer: an optimizer for which `steps_by_unit`.
            parameters: those of the units; parameters of other optimizers are left alone.
            reduced: have their gradients, which are taken away after the step.
        """
        for groups in _divide(optimizer, self._unit_of, parameters.__contains__):
            part = [p for group in groups for p in group]
            self._ahead.append(part)
            self._num_ahead += 1
            self._step_part(twin_of(optimizer, groups), part, reduced)
            set_gradients((p, None) for p in part)

    def _step_part(
        self, optimizer: Optimizer, part: list[ShardedParameter], reduced: Sequence[Gradients] = ()
    ) -> None:
        for gradients in reduced:
            gradients.hand_over(set(part))
        for number in range(max((home.num_pieces(part) for home in self._homes), default=1)):
            with ExitStack() as stack:
                stack.enter_context(self._state.steps.unseen())
                for home in self._homes:
                    stack.enter_context(home.fetched(optimizer, part, number))
                self._own_step(optimizer)


def is_divisible(optimizer: Optimizer) -> bool:
    """True if an optimizer steps each element by itself, so also pieces of a parameter.

    One that needs norms or whole tensors does not. A class that is not known may count steps by group.
    """
    return is_known(optimizer) and not isinstance(optimizer, UsesNorms | UsesWholes)


def steps_by_unit(optimizer: Optimizer, axes: Axes) -> bool:
    """True if an optimizer may step units at different times: no rank waits for others in its step."""
    return is_divisible(optimizer) or (is_known(optimizer) and axes.everyone.size == 1)


def _divide(
    optimizer: Optimizer, unit_of: Mapping[ShardedParameter, int], is_chosen: Callable[[Any], bool]
) -> list[Groups]:
    """Divide the chosen parameters by unit; those that are in no unit, such as ignored ones, are a part."""
    parts: dict[int, Groups] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in filter(is_chosen, group["params"]):
            groups = parts.setdefault(unit_of.get(p, _OTHERS), [[] for _ in optimizer.param_groups])
            groups[number].append(p)
    return [parts[number] for number in sorted(parts)]


def is_known(optimizer: Optimizer) -> bool:
    """True for a class of a library whose steps are known to treat each parameter by itself."""
    return type(optimizer).__module__.partition(".")[0] in ("torch", "zeroshard", "bitsandbytes")


def twin_of(optimizer: Optimizer, groups: Sequence[Sequence[ShardedParameter]]) -> Optimizer:
    """Make the twin of an optimizer.

    Args:
        optimizer: the optimizer; its state is shared, and its options are taken at this moment.
        groups: the parameters of each group of the twin.
    """
    twin: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if isinstance(value, MethodType) and value.__self__ is optimizer:  # as of adopted optimizers
            value = MethodType(value.__func__, twin)
        vars(twin)[name] = value
    # A step that calls the step of its base class would run them in its middle.
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.state = own_states(optimizer)
    twin.param_groups = [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
        | {"params": list(parameters)}
        for group, parameters in zip(optimizer.param_groups, groups, strict=True)
    ]
    stepped: Optimizer = twin
    return stepped


# ----------------------------------------------------------------------------- steps during the backward


class EarlySteps(AbstractContextManager[None]):
    """A context around the backward that steps. At its end all units are stepped that were begun.

    A unit is stepped as soon as its gradient is reduced, and the gradient goes. So the gradients of a few
    units exist at a time, and values of a farther tier travel during the backward. Results are the same as
    with a step after the backward, if there is one backward for each micro-batch. The backward of the last
    micro-batch steps: in `train_batch`, where nobody else asks for gradients, or anywhere with
    `offload.step_in_backward`. A unit is left to `optimizer.step()` if this rank has no gradient for a part
    of it, or if its gradient may come in several parts. The host waits for stepped values before somebody
    looks.

    Args:
        runtime: the runtime of the parameters.
        optimizer: the optimizer of the engine.
        parts: its steps by part.

    Raises:
        ValueError: all backwards are to step, but ranks wait for each other in a step of the optimizer, or
            its class is not known.
    """

    def __init__(self, runtime: Runtime, optimizer: Optimizer, parts: Sequence[StepByParts]) -> None:
        self._steps_all = bool(runtime.context.setting.steps_in_backward)
        self._can_step = steps_by_unit(optimizer, runtime.context.axes)
        if self._steps_all and not self._can_step:
            raise ValueError(
                f"offload.step_in_backward: expected an optimizer of torch, zeroshard or bitsandbytes that "
                f"steps each element by itself, or one rank, got {type(optimizer).__name__}"
            )
        self._reducer, self._optimizer, self._state = runtime.reducer, optimizer, runtime.state
        (self._parts,) = parts
        self._step_of_engine: Any = optimizer.step
        """The step that judges, steps and counts."""
        self._uncounted: list[tuple[FlatBuffer, set[ShardedParameter]]] = []
        """Parameters that this backward has stepped, and may still read as they were."""
        self._options: dict[str, dict[str, Any]] = {}
        """The options of each group, and of single parameters, with which units were stepped."""

    def around(self) -> AbstractContextManager[None]:
        """Return a context for the last backward of a step.

        In the first one, if it is of `train_batch`, nothing is stepped: it shows whether gradients come after
        the reduction of their unit.
        """
        if self._steps_all:
            return self
        optimizer, own = self._optimizer, self._step_of_engine
        step: Any = optimizer.step  # an LR scheduler wraps the function of the method
        is_own = step is own or getattr(step, "__wrapped__", None) is own.__func__
        is_asked = any(_has_hooks_of_others(optimizer, when) for when in ("pre", "post"))
        may = self._can_step and is_own and not is_asked and self._reducer.num_late == 0
        return self if may else nullcontext()

    def __enter__(self) -> None:
        self._state.refuse("a backward", Moment.FAILED)
        self._reducer.check_begin()
        self._state.steps.take_all()
        if _has_hooks_of_others(self._optimizer):
            warn_user(
                "offload.step_in_backward: a hook of register_step_pre_hook() runs after units were "
                "stepped, so it finds no gradients of them, and what it does to gradients has no effect"
            )
        self._options = _options(self._optimizer)
        self._parts.begin_units()
        self._reducer.step_unit = self._step

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._reducer.step_unit = None
        uncounted, self._uncounted = self._uncounted, []
        for buffer, parameters in uncounted:
            buffer.count_edits(parameters)
        if Moment.STEPPED in self._state.moments:  # on all ranks: any may have stepped units
            self._state.begin_step() if exc_type is None else self._state.fail_step()
            self._parts.wait_later()

    def check(self) -> None:
        """Check that the units that were stepped belong to the step that begins.

        Raises:
            RuntimeError: their backward has failed, or options of the optimizer were changed after it.
        """
        self._state.refuse("a step", Moment.FAILED)
        if Moment.STEPPED not in self._state.moments:
            return
        now = _options(self._optimizer)
        for owner, before in self._options.items():
            for name, value in before.items():
                if now[owner].get(name) != value:
                    raise RuntimeError(
                        f"{name!r} of {owner} of the optimizer was changed between backward and "
                        "step(), and units have been stepped with the value before: change it before "
                        "backward, or set offload.step_in_backward=False"
                    )

    def _step(self, unit: Unit) -> None:
        """Step a unit whose gradients are reduced."""
        self._state.begin_step()
        parameters = {p for gradients in unit.gradients for p in gradients.buffer.sharded}
        with torch.no_grad(), past_guards():
            self._parts.step_units(self._optimizer, parameters, unit.gradients)
        self._state.steps.wait_later(self._parts.wait)  # a hook of this backward may look
        for buffer in (gradients.buffer for gradients in unit.gradients):
            if buffer.plan.is_alias:  # a later use of these values in the backward is torch's error
                buffer.count_edits(parameters)
            else:
                self._uncounted.append((buffer, parameters))


def _has_hooks_of_others(optimizer: Optimizer, when: str = "pre") -> bool:
    """True if hooks that are not zeroshard's run before ("pre") or after ("post") steps of an optimizer."""
    of_all = getattr(torch_optimizer, f"_global_optimizer_{when}_hooks", {})
    hooks = (*getattr(optimizer, f"_optimizer_step_{when}_hooks").values(), *of_all.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("zeroshard.") for hook in hooks)


def _options(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """The options of each group; of a tensor its identity and version, as its values may be on a device."""
    return {
        f"group {number}": {
            name: (id(value), value._version) if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for number, group in enumerate(optimizer.param_groups)
    }
