"""The state of a sharded module, which its parameters share: its phase, and answers to parameters."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any


class Phase(Enum):
    """The phases of a sharded module."""

    REST = "at rest"
    FORWARD = "in a forward"
    BACKWARD = "in a backward"
    STEP = "between the steps of optimizers that step together"
    CLOSED = "closed"


_MOVES = {
    Phase.REST: {Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.CLOSED},
    Phase.FORWARD: {Phase.REST, Phase.CLOSED},
    Phase.BACKWARD: {Phase.REST, Phase.STEP, Phase.CLOSED},
    Phase.STEP: {Phase.REST, Phase.BACKWARD, Phase.CLOSED},
    Phase.CLOSED: {Phase.CLOSED},
}
"""The next call notices a backward that ended in an exception, and moves to REST first."""


class LastStep(Enum):
    """The state of the last step of an optimizer."""

    ENDED = "ended"
    BEGUN = "begun"
    FAILED = "failed in a forward or backward, where its exception may be caught"


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
    is_in_step = False
    """True from the beginning of a backward that steps units to the end of that step."""
    last_step = LastStep.ENDED
    """The last step of an optimizer, whoever takes it; a closure is a part of its step."""
    has_shown_gradients = False
    """True if somebody may hold a `p.grad`, and change it unseen."""
    before_look: Callable[[], object] | None = None
    """Takes the steps that wait for a forward, before somebody looks at their values; None: none waits."""
    gives_memory: Callable[[], object] | None = None
    """Notes that somebody has a tensor over a parameter's memory; None: nobody needs to know."""
    is_averaged = False
    """True while averages stand in the main parameters for the trained values; see `stepping/averages.py`."""
    is_in_batch = False
    """True while a pipeline runs the micro-batches of a batch, or of a list of many."""
    has_failed_in_list = False
    """True if a list of an asynchronous pipeline has ended in an exception, between its actions."""
    num_changes = 0
    """How often main parameters were written: by steps, loads, and averages that were shown or taken away."""
    has_sums = False
    """True while gradients that this rank has added up wait for a later reduction, in no `p.grad` yet."""
    drop_gradient: Callable[[Any], object]
    """Drops these sums for one parameter; set by the runtime."""

    @staticmethod
    def follow_step(unit_name: str, call: Callable[[], None]) -> None:
        """Call something after the step of a unit; replaced where steps may wait for a forward."""
        call()

    def look(self) -> None:
        """Prepare for somebody who looks at parameters, gradients or optimizer states."""
        if self.before_look is not None:
            self.before_look()

    def show_gradients(self) -> None:
        """Prepare for somebody who reads or sets a `p.grad`."""
        self.look()
        self.has_shown_gradients = True

    def begin_step(self) -> None:
        """Note that a step begins, or goes on.

        Raises:
            RuntimeError: see `refuse_failed_step`.
        """
        self.refuse_failed_step()
        self.last_step = LastStep.BEGUN

    def refuse_failed_step(self) -> None:
        """Refuse to go on after a step that has failed in a forward or backward.

        Raises:
            RuntimeError: one has, and nothing was loaded since.
        """
        if self.last_step is LastStep.FAILED:
            raise RuntimeError(
                "an exception has ended the last step in a forward or backward: some parameters were stepped "
                "and others were not. Load the last checkpoint with engine.load_checkpoint()"
            )

    def end_step(self) -> None:
        """Note the end of a step, or a load of a checkpoint that has replaced its values."""
        self.last_step, self.is_in_step = LastStep.ENDED, False

    def refuse_between_steps(self) -> None:
        """Refuse a forward between steps of optimizers that step together.

        Raises:
            RuntimeError: one of them has stepped, and another has not.
        """
        if self.phase is Phase.STEP:
            raise RuntimeError(
                "a forward between the steps of optimizers that were attached together: parameters are "
                "gathered only after the last of these steps. Step all of them before the forward, or "
                "attach each optimizer by itself"
            )

    def move(self, phase: Phase) -> None:
        """Go on to another phase.

        Raises:
            RuntimeError: no move leads there from the present phase.
        """
        if phase not in _MOVES[self.phase]:
            raise RuntimeError(f"a sharded module {self.phase.value} cannot go on to be {phase.value}")
        self.phase = phase


def refuse_in_step(state: ModuleState, what: str) -> None:
    """Refuse a call that needs the gradients of all units, if a backward has stepped units.

    Raises:
        RuntimeError: it has, and step() has not been called since.
    """
    if state.is_in_step:
        raise RuntimeError(
            f"{what} after a backward that has stepped units, whose gradients are gone: set "
            "offload.step_in_backward=False to have all gradients until step()"
        )


def refuse_halfway(state: ModuleState, what: str) -> None:
    """Refuse a call for a model that is between two steps.

    Raises:
        RuntimeError: the last step has begun and not ended.
    """
    if state.last_step is not LastStep.ENDED:
        raise RuntimeError(
            f"{what} after a step that was interrupted: some parameters may have been stepped and others "
            "not, so nothing was saved. Load the last checkpoint, or take a whole step before saving"
        )


def refuse_averages(state: ModuleState, what: str) -> None:
    """Refuse a call that would work on averages as if they were the trained parameters.

    Raises:
        RuntimeError: averages stand in the main parameters.
    """
    if state.is_averaged:
        raise RuntimeError(
            f"{what} inside EMA.applied(), where averages stand in the model for the trained parameters: "
            "call it after the block, which puts the trained values back"
        )


def refuse_in_batch(state: ModuleState, what: str) -> None:
    """Refuse a call that needs a pipeline without micro-batches under way.

    Raises:
        RuntimeError: a batch is under way, or a list of an asynchronous pipeline has failed in the middle.
    """
    if state.is_in_batch:
        raise RuntimeError(
            f"{what} inside of a batch, whose micro-batches are under way over the pipeline ranks: call it "
            "before or after the batch, not from a hook, a loss function or the iterator of train_batches()"
        )
    if state.has_failed_in_list:
        raise RuntimeError(
            f"{what} after a list that ended in an exception between its actions: pipeline ranks may have "
            "taken different numbers of steps, and messages may be under way. Make the engine anew, and "
            "load the last checkpoint"
        )


def refuse_to_drop(state: ModuleState) -> None:
    """Refuse to forget the gradients of a batch, if a backward has stepped units with it.

    After a backward that has failed the gradients may go: only a load of a checkpoint leads on.

    Raises:
        RuntimeError: it has, and step() has not been called since.
    """
    if state.is_in_step and state.last_step is not LastStep.FAILED:
        raise RuntimeError(
            "zero_grad() between backward and step(): units were stepped in the backward, so the step of "
            "this batch has been taken and cannot be dropped. Call step() to end it and go on; to drop "
            "batches after their backward, set offload.step_in_backward=False"
        )
