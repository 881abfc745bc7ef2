"""The state of a sharded module, which its parameters share: its phase, and answers to parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any
from weakref import WeakSet

from torch import Tensor


class Phase(Enum):
    """The phases of a sharded module."""

    __hash__ = object.__hash__  # an enum's own takes many times as long
    REST = "at rest"
    FORWARD = "in a forward"
    BACKWARD = "in a backward"
    CLOSED = "closed"


_MOVES = {
    Phase.REST: {Phase.FORWARD, Phase.BACKWARD, Phase.CLOSED},
    Phase.FORWARD: {Phase.REST, Phase.CLOSED},
    Phase.BACKWARD: {Phase.REST, Phase.CLOSED},
    Phase.CLOSED: {Phase.CLOSED},
}
"""The next call notices a backward that ended in an exception, and moves to REST first."""


class Moment(Enum):
    """The moments in which calls may be refused. The value ends the sentence that begins with the call."""

    __hash__ = object.__hash__  # an enum's own takes many times as long
    SHOWN = (
        "inside engine.unsharded() would take the full parameters for the model's own: call it after the "
        "block; inside, the model's own methods see full parameters"
    )
    AVERAGED = (
        "inside EMA.applied(), where averages stand in the model for the trained parameters: call it after "
        "the block, which puts the trained values back"
    )
    BATCH = (
        "inside of a batch, whose micro-batches are under way over the pipeline ranks: call it before or "
        "after the batch, not from a hook, a loss function or the iterator of train_batches()"
    )
    BROKEN_LIST = (
        "after a list that ended in an exception between its actions: pipeline ranks may have taken "
        "different numbers of steps, and messages may be under way. Make the engine anew, and load the last "
        "checkpoint"
    )
    IN_PARTS = "with mesh.pp above 1: each rank has a part of the model; train_batch() takes a whole step"
    """For good, in an engine over pipeline ranks."""
    NO_OPTIMIZER = "needs an optimizer: give one to zeroshard.initialize"
    """For good, in an engine without optimizer."""
    BETWEEN_STEPS = (
        "between the steps of optimizers that were attached together: parameters are gathered only after the "
        "last of these steps. Step all of them before the forward, or attach each optimizer by itself"
    )
    STEPPED = (
        "after a backward that has stepped units, whose gradients are gone: call step() to end their step. "
        "To have all gradients until step(), to drop them, or to take several backwards, set "
        "offload.step_in_backward=False"
    )
    """From the beginning of a backward that steps units to the end of that step."""
    BEGUN = (
        "after a step that was interrupted: some parameters may have been stepped and others not, so nothing "
        "was saved. Load the last checkpoint, or take a whole step before saving"
    )
    """From the beginning of a step, whoever takes it, to its end; a closure is a part of it."""
    FAILED = (
        "after an exception has ended the last step in a forward or backward: some parameters were stepped "
        "and others were not. Load the last checkpoint with engine.load_checkpoint(); to go on after an "
        "exception in a backward, set offload.step_in_backward=False"
    )
    TAINTED = (
        "after an exception in backward left gradients that hold only a part of a micro-batch; call "
        "zero_grad() and repeat the micro-batches since the last step"
    )


IN_BATCH = (Moment.BATCH, Moment.BROKEN_LIST)
"""The moments of calls that need a pipeline without micro-batches under way."""


class Steps:
    """The work of a step that may be done later; with this class it is done at once, and nothing is left.

    A module whose values travel has `stepping/late.py: LateSteps` in its place, but for the time in which the
    optimizer steps: what it reads is its own, and nobody looks.
    """

    take_all: Callable[[], object] = object
    """Takes the steps that are left."""
    scale_gradients: Callable[[], object] = object
    """Does as `take_all`, and scales the gradients that are left: others may be added to them."""
    before_look: Callable[[], object] = object
    """Does as `scale_gradients`, and lets the host wait: parameters, gradients or states may be read."""

    def never_wait(self) -> None:
        """Do all that is left, and let no step wait any more: somebody may look unseen."""

    def unseen(self) -> AbstractContextManager[object]:
        """Return the context in which an optimizer steps: nobody looks."""
        return nullcontext()

    def prepare(self, optimizer: Any, parts: list[Any]) -> None:
        """Prepare for a step of an optimizer: put its parts into the order in which they will be taken."""

    def step_later(self, parts: Any, end: Callable[[], None], wait: Callable[[], None]) -> bool:
        """Let the parts of a step wait, each for a forward of its unit; False if it is to be taken at once.

        Args:
            parts: the parameters of each part, all with gradients, and its step; a part without parameters
                is stepped at once.
            end: ends the step, after all parts.
            wait: as of `wait_later`.
        """
        return False

    def scale_later(self, gradients: Any, factor: Tensor) -> bool:
        """Let gradients be scaled where they are stepped, or before a look; False where no step may wait.

        Args:
            gradients: pairs of a parameter and its gradient, on the host.
            factor: 0-dim, on the device.
        """
        return False

    def wait_later(self, wait: Callable[[], None]) -> bool:
        """Let the host wait for values before somebody looks; False if a look may be unseen, too."""
        return False

    def follow(self, unit_name: str, call: Callable[[], None]) -> None:
        """Call something after the step of a unit."""
        call()


class ModuleState:
    """The state that a runtime shares with its parameters."""

    phase = Phase.REST
    reads_main = False
    """True while gathers that nobody has waited for may read the main parameters."""
    before_edit: Callable[[], object] = object
    """Waits for these gathers."""
    refusal = ""
    """The reason why sharded parameters cannot be used any more, once the engine is closed."""
    has_hooks = False
    """True once a post-accumulate hook was registered on a sharded parameter."""
    has_shown_gradients = False
    """True if somebody may hold a `p.grad`, and change it unseen."""
    factor: Tensor | None = None
    """0-dim: the step multiplies gradients on the host by it; None: they are scaled."""
    can_wait = False
    """True if steps may wait, until somebody has a tensor over the memory of a parameter or a state."""
    hook: Any = None
    """The `gradient_hooks.GradientHook` that may reduce gradients; None: the plan does."""
    num_changes = 0
    """How often main parameters were written: by steps, loads, and averages that were shown or taken away."""
    num_edits = 0
    """How often the user has written full parameters."""
    has_sums = False
    """True while gradients that this rank has added up wait for a later reduction, in no `p.grad` yet."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.attached = WeakSet[Any]()
        """The optimizers whose steps are the engine's."""
        self.moments: set[Moment] = set()
        """The moments that last."""

    def refuse(self, call: str, *moments: Moment) -> None:
        """Refuse a call in some moments.

        Raises:
            RuntimeError: one of them lasts.
        """
        for moment in moments:
            if moment in self.moments:
                raise RuntimeError(f"{call} {moment.value}")

    def begin_step(self) -> None:
        """Note that a step begins, or goes on. Raises RuntimeError if the last one has failed."""
        self.refuse("a step", Moment.FAILED)
        self.moments.add(Moment.BEGUN)

    def fail_step(self) -> None:
        """Note that a step has failed in a forward or backward, where its exception may be caught."""
        self.end_step()
        self.moments.add(Moment.FAILED)

    def end_step(self) -> None:
        """Note the end of a step, or a load of a checkpoint that has replaced its values."""
        self.moments -= {Moment.BEGUN, Moment.STEPPED, Moment.FAILED}

    def move(self, phase: Phase) -> None:
        """Go on to another phase.

        Raises:
            RuntimeError: no move leads there from the present phase.
        """
        if phase not in _MOVES[self.phase]:
            raise RuntimeError(f"a sharded module {self.phase.value} cannot go on to be {phase.value}")
        self.phase = phase
