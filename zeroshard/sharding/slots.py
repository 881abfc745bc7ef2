"""The slots of a unit: the places in modules that hold its parameters; and edits of the parameters there.

A slot shows the sharded parameter, or a stand-in for it under `unsharded()`. In forward and backward it shows
the unsharded parameter. Any other object was put there by somebody: by an assignment after `initialize`, or
for one call by `torch.func.functional_call`. The engine computes with its own parameters and refuses others.

Edits of parameters in a forward or backward are refused if the next gather would overwrite them. Versions and
addresses of a unit's parameters are compared with the last look's. `.data` shares the version of its
parameter. No value is compared: the answer is the same on all ranks, whose slices differ. Where modules
compute with the main parameters themselves, an edit is kept, as in DistributedDataParallel. Equal values in
other memory are no edit: a recurrent layer on a GPU moves its weights into one piece of memory for cuDNN, and
counts no version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.parameters.unsharded import edit_error, equal_values, set_data
from zeroshard.sharding.buffer import FlatBuffer

_version_of = attrgetter("_version")


class Slots:
    """The slots of one unit.

    Args:
        buffers: the buffers of the unit.
    """

    def __init__(self, buffers: Sequence[FlatBuffer]) -> None:
        self._places = [
            (owner, attribute, unsharded, sharded)
            for buffer in buffers
            for original, unsharded, sharded in zip(
                buffer.originals, buffer.unsharded, buffer.sharded, strict=True
            )
            for owner, attribute in original.owners
        ]
        self._stand_ins: Mapping[int, nn.Parameter] = {}
        self._slots: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        """Each slot: the dictionary of its module, the name there, the unsharded parameter, and what it shows
        at rest."""
        plain = nn.Module.__setattr__
        self._watched = [place[:2] for place in self._places if type(place[0]).__setattr__ is not plain]
        """The places in modules that must hear of a change: an RNN keeps a list of its weights, too."""
        self._versions: dict[int, tuple[int, int]] = {}
        """The version and the place in memory of each stand-in when it was first shown, by its id."""
        self.stand_in({})

    @property
    def owners(self) -> set[nn.Module]:
        """The modules that have the slots."""
        return {owner for owner, _, _, _ in self._places}

    @property
    def is_shown(self) -> bool:
        """True while stand-ins are shown for the sharded parameters."""
        return bool(self._stand_ins)

    def stand_in(self, parameters: Mapping[int, nn.Parameter]) -> Mapping[int, nn.Parameter]:
        """Show stand-ins at rest from now on, by the id of the sharded parameter.

        Returns:
            The stand-ins that were shown before.
        """
        before, self._stand_ins = self._stand_ins, parameters
        self._slots = [
            (owner._parameters, attribute, unsharded, parameters.get(id(sharded), sharded))
            for owner, attribute, unsharded, sharded in self._places
        ]
        self._versions = {
            id(shown): self._versions.get(id(shown), (shown._version, shown.data_ptr()))
            for _, _, _, shown in self._slots
            if parameters
        }
        for slots, attribute, _, shown in self._slots:
            if attribute in slots:  # a removed parameter stays removed, for `check` to find
                slots[attribute] = shown
        self._announce()
        return before

    def install(self) -> None:
        """Show the unsharded parameters.

        Raises:
            RuntimeError: as `check`; or a stand-in was edited, which the engine does not see.
        """
        if self._stand_ins:
            self._check_shown()
        for slots, attribute, unsharded, shown in self._slots:
            current = slots.get(attribute)
            if current is shown:
                slots[attribute] = unsharded
            elif current is not unsharded:
                self.check()
        self._announce()

    def uninstall(self) -> None:
        """Show the parameters of rest again. An object of others stays, for `check` to find."""
        for slots, attribute, unsharded, shown in self._slots:
            if slots.get(attribute) is unsharded:
                slots[attribute] = shown
        self._announce()

    def _announce(self) -> None:
        for owner, attribute in self._watched:
            if attribute in owner._parameters:
                setattr(owner, attribute, owner._parameters[attribute])

    def check(self) -> None:
        """Look at the slots between forwards.

        Raises:
            RuntimeError: a slot holds an object of others.
        """
        for (slots, attribute, unsharded, shown), place in zip(self._slots, self._places, strict=True):
            current = slots.get(attribute)
            if current is not shown and current is not unsharded:
                raise RuntimeError(_describe(place[3].fqn, current))

    def clear(self) -> None:
        """Drop modules and parameters."""
        self._places, self._slots, self._watched, self._stand_ins = [], [], [], {}

    def _check_shown(self) -> None:
        for (_, _, _, sharded), (_, _, _, shown) in zip(self._places, self._slots, strict=True):
            if self._versions.get(id(shown)) != (shown._version, shown.data_ptr()):
                raise RuntimeError(
                    f"a forward inside engine.unsharded() after an edit of '{sharded.fqn}': the engine "
                    "still computes with the values before the edit. Leave the block, with "
                    "write_back=True, and then call forward"
                )


def check_edits(buffers: Sequence[FlatBuffer]) -> None:
    """Compare the unsharded parameters of a unit with the parameters at the last look.

    Raises:
        RuntimeError: one was edited since, in memory of its own. It is gathered again.
    """
    # torch takes several times as long to read an attribute of a subclass of Parameter.
    with past_guards():
        edited = [b for b in buffers if list(map(_version_of, b.unsharded)) != b.versions]
        moved = [buffer for buffer in buffers if buffer.has_moved()]
    if moved or edited:
        _refuse_edits(buffers, moved)


@torch.no_grad()
def _refuse_edits(buffers: Sequence[FlatBuffer], moved: Sequence[FlatBuffer]) -> None:
    lost = []
    for buffer in buffers:
        before, buffer.versions = buffer.versions, list(map(_version_of, buffer.unsharded))
        for index, parameter in enumerate(buffer.unsharded):
            is_lost = before[index] != buffer.versions[index] and not buffer.shows_main
            if buffer in moved:
                values, view = parameter.detach(), buffer.view(index)
                set_data(parameter, view)
                is_lost |= not equal_values(values, view)
            if is_lost:
                buffer.source.changed()
                lost.append(parameter.fqn)
    if lost:
        raise edit_error(lost[0])


def _describe(fqn: str, current: object) -> str:
    if current is None:
        return f"'{fqn}' was removed after initialize; expected modules that keep their parameters"
    if isinstance(current, ShardedParameter):
        return (
            f"'{fqn}' was tied to '{current.fqn}' after initialize, but the two are sharded separately: "
            "tie parameters before initialize"
        )
    shape = f" of shape {list(current.shape)}" if isinstance(current, Tensor) else ""
    return (
        f"'{fqn}' was replaced after initialize by a {type(current).__name__}{shape}, which would be neither "
        "sharded nor trained: assign parameters before initialize, or edit them in place under "
        "engine.unsharded(write_back=True). For torch.func.functional_call with other parameters use a "
        "model that is not sharded"
    )
