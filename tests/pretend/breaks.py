"""Ways to break the engine that the pretend device must find, each with a scenario that shows it.

They damage seams that are few and stable: waits for marks, marks, side streams, and an axis's collectives.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from tests.pretend.clocks import Event, Stream
from tests.pretend.findings import Kind
from tests.pretend.scenario import Bench
from tests.pretend.transport import HostWork
from zeroshard.comm import collectives, mesh, streams
from zeroshard.comm.collectives import Axis, Handle
from zeroshard.comm.messages import Messages
from zeroshard.comm.streams import Mark, SideStream
from zeroshard.comm.watch.status import GATHER, Ledger
from zeroshard.forwards.activations import SavedMemory
from zeroshard.parallel.pipeline import training
from zeroshard.sharding import buffer, runtime
from zeroshard.sharding.buffer import MainStore
from zeroshard.sharding.unit import Unit
from zeroshard.stepping import stored
from zeroshard.stepping.late import LateSteps
from zeroshard.stores.files import Swap
from zeroshard.stores.host import HostBuffer
from zeroshard.stores.pieces import HostPieces, Piece
from zeroshard.stores.store import HostGradients

Damage = Callable[[Bench, pytest.MonkeyPatch], None]


@dataclass(frozen=True, kw_only=True)
class Break:
    """A damage, and how it must show."""

    apply: Damage
    scenarios: tuple[str, ...]
    """Each of them must show it."""
    kinds: frozenset[Kind]
    """Kinds of findings that each of them must show; if there are none, there must be no findings."""

    @contextmanager
    def damage(self, bench: Bench) -> Iterator[None]:
        """Inside, the engine is broken."""
        with pytest.MonkeyPatch.context() as patch:
            self.apply(bench, patch)
            yield


BREAKS: dict[str, Break] = {}


def _must_show(*kinds: Kind, scenarios: tuple[str, ...]) -> Callable[[Damage], Damage]:
    def register(apply: Damage) -> Damage:
        name = apply.__name__.removeprefix("_")
        BREAKS[name] = Break(apply=apply, scenarios=scenarios, kinds=frozenset(kinds))
        return apply

    return register


# -- waits and marks -----------------------------------------------------------------------------------------


def _stream_of(mark: Mark) -> str:
    event: Any = mark.event
    return event.stream.name if event is not None else ""


def _ignore_marks_of(stream: str, patch: pytest.MonkeyPatch) -> None:
    wait = Mark.wait
    patch.setattr(Mark, "wait", lambda mark: None if _stream_of(mark).startswith(stream) else wait(mark))


@_must_show(Kind.RACE, scenarios=("stage0_bf16_clip", "stage3", "second_copy"))
def _no_wait_for_gathers(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Compute does not wait until parameters are there."""
    _ignore_marks_of("gather", patch)


@_must_show(Kind.RACE, Kind.REUSE, scenarios=("stage2_bf16_wire", "stage3", "hybrid"))
def _no_wait_for_reductions(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Compute uses reduced gradients, and the buffers that they were packed in, while a reduction runs."""
    _ignore_marks_of("reduce", patch)


@_must_show(Kind.RACE, scenarios=("stage0_bf16_clip", "stage3"))
def _no_marks(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Nothing is noted in the side streams that compute could wait for."""
    patch.setattr(streams, "mark_here", lambda device: Mark(None))
    patch.setattr(SideStream, "mark", lambda side: Mark(None))


@_must_show(Kind.RACE, scenarios=("step_after_a_failed_forward",))
def _free_without_wait(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """A unit is freed while its gather is under way, and nobody waits for that gather."""
    reshard = Unit.reshard

    def freed(unit: Unit, *args: Any, **kwargs: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            _ignore_marks_of("gather", inner)
            reshard(unit, *args, **kwargs)

    patch.setattr(Unit, "reshard", freed)


@_must_show(Kind.RACE, scenarios=("pipeline_stage0", "pipeline_zbv"))
def _no_wait_for_messages(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Compute does not wait until activations and gradients are there."""

    own_wait = Messages.wait

    def wait(messages: Messages, works: Any, label: str, *, on_host: bool = False) -> None:
        own_wait(messages, [work for work in works if isinstance(work, HostWork)], label, on_host=True)

    patch.setattr(Messages, "wait", wait)


@_must_show(Kind.CYCLE, scenarios=("pipeline_stage0", "pipeline_interleaved", "pipeline_of_4"))
def _one_communicator_for_all_messages(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Messages of all pairs of pipeline ranks share a communicator; receives are posted ahead."""
    patch.setattr(training, "open_pairs", lambda axes, pairs: {})


# -- streams -------------------------------------------------------------------------------------------------


def _ignore_compute(streams: str | tuple[str, ...], patch: pytest.MonkeyPatch) -> None:
    wait_stream = Stream.wait_stream

    def waits(stream: Stream, other: Stream) -> None:
        if not stream.name.startswith(streams):
            wait_stream(stream, other)

    patch.setattr(Stream, "wait_stream", waits)


@_must_show(Kind.RACE, scenarios=("stage0_bf16_clip", "stage3", "hybrid"))
def _no_after_compute(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Side streams do not wait for what compute has made, or still uses."""
    _ignore_compute(("gather", "reduce"), patch)


@_must_show(Kind.RACE, scenarios=("stage1", "stage3"))
def _streams_of_communicators(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Collectives run on a stream of their communicator's own, which marks on side streams do not cover."""
    transport = vars(collectives)["dist"]
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        function = getattr(transport, name)

        def issue(*args: Any, function: Any = function, async_op: bool = False, **kwargs: Any) -> None:
            function(*args, async_op=True, **kwargs)

        patch.setattr(transport, name, issue, raising=False)


# -- copies to the host and back -----------------------------------------------------------------------------


@_must_show(Kind.REUSE, scenarios=("offloaded_stage3", "offloaded_stage1_recompute"))
def _no_wait_for_copies_to_the_host(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Activations are freed while they are copied to the host."""
    _ignore_marks_of("to_host", patch)


@_must_show(Kind.RACE, scenarios=("offloaded_stage3", "offloaded_stage1_recompute"))
def _no_wait_for_copies_to_the_device(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Backward uses activations while they are on their way back."""
    _ignore_marks_of("to_device", patch)


@_must_show(Kind.RACE, scenarios=("offloaded_stage3",))
def _copies_before_compute(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Activations are copied before compute has made them."""
    _ignore_compute("to_host", patch)


@_must_show(Kind.REUSE, scenarios=("offloaded_stage3",))
def _copies_back_before_compute(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Activations come back into memory that compute still uses for others."""
    _ignore_compute("to_device", patch)


@_must_show(Kind.FREED, scenarios=("offloaded_sizes_differ", "offloaded_dropped"))
def _activations_go_under_their_copies(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Host memory of activations goes back to the system while the device copies from or to it."""
    patch.delattr(HostBuffer, "__del__")


@_must_show(Kind.RACE, scenarios=("parameters_on_host_gradients_read_once",))
def _no_wait_for_gradients_on_the_host(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Somebody reads gradients while they are copied to the host."""
    patch.setattr(HostGradients, "wait", lambda store: None)


@_must_show(Kind.RACE, scenarios=("host_stage3", "host_stepped_in_backward", "host_in_pieces"))
def _no_wait_for_what_is_stepped(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The device steps values before they have come from the host, and reads others into their memory."""
    patch.setattr(Piece, "follow", lambda piece: None)


@_must_show(Kind.RACE, scenarios=("host_edited", "parameters_on_host_saved"))
def _no_wait_until_stepped_values_rest(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """A step ends while values are still copied back to the host, where others look at them."""
    patch.setattr(Piece, "join", lambda piece: "")


@_must_show(Kind.REUSE, scenarios=("parameters_on_host_frozen_for_a_step",))
def _parameters_are_freed_while_they_are_read(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """A step reads main parameters where they are gathered, and the unit is freed before that copy."""
    lend = Unit.lend
    patch.setattr(Unit, "lend", lambda unit, buffer, follow: lend(unit, buffer, lambda: None))


@_must_show(Kind.RACE, scenarios=("host_one_unit",))
def _reads_do_not_follow_the_writes_of_the_step_before(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """States are read for a step while the last step still copies them to the host."""
    patch.setattr(HostPieces, "end_writes", lambda pieces: None)


@_must_show(Kind.RACE, scenarios=("host_in_pieces_interrupted_in_backward",))
def _no_wait_after_a_step_that_failed(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """States are loaded while a step that has failed copies the states of before to the device."""
    patch.setattr(stored, "mark_here", lambda device: Mark(None))


@_must_show(Kind.RACE, scenarios=("stepped_in_backward_evaluated",))
def _no_wait_of_gathers_for_stepped_values(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """A unit is gathered while its stepped values are copied to the device."""
    patch.setattr(MainStore, "await_stepped", lambda buffer: None)


@_must_show(Kind.REUSE, scenarios=("host_stage3_bf16", "host_stage1_bf16"))
def _gradients_are_freed_under_their_copies(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Reduced gradients leave the device while they are copied to the host."""
    patch.setattr(SideStream, "hold", lambda side, tensor, *, most: side.mark())


@_must_show(Kind.REUSE, scenarios=("files_stage1",))
def _no_wait_for_older_gradients(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Compute uses the memory of older gradients before they have been copied to the host."""
    _ignore_marks_of("to_host", patch)


@_must_show(
    Kind.RACE,
    scenarios=("host_edited", "host_edited_stage1"),
)
def _no_wait_before_the_host_writes(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The host changes main parameters while gathers copy them to the device."""
    patch.setattr(MainStore, "await_copies", lambda buffer: None)


@_must_show(Kind.RACE, scenarios=("parameters_on_host_in_pieces",))
def _a_step_hides_what_is_copied_along_with_it(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The host casts main parameters after each step, though the step has written the cast ones, too."""
    stepped = MainStore.stepped

    def loses_copy(store: MainStore, values: Tensor, start: int, before: object) -> None:
        stepped(store, values, start, before)
        store.copied = None

    patch.setattr(MainStore, "stepped", loses_copy)
    patch.setattr(buffer, "mark_here", lambda device: Mark(None))


@_must_show(Kind.RACE, scenarios=("host_edited",))
def _no_wait_in_gathers(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Main parameters change while gathers still copy them to the device."""
    wait = MainStore.await_copies

    def waits(store: MainStore) -> None:
        if sys._getframe(1).f_code.co_name != "_await_gathers":
            wait(store)

    patch.setattr(MainStore, "await_copies", waits)


# Three more calls of await_copies, in MainStore.release, Edits and EarlySteps, are not needed as the engine
# is now, so nothing shows their absence. Steps hold main parameters until the streams have ended. Before an
# edit in a forward is kept, the host waits for a copy of the edited values on compute. Before a unit is
# stepped in the backward, it waits for the gradient's copy, which began after all compute so far. In both
# cases compute had waited for the gathers of the unit: it has computed with them.


@_must_show(Kind.RACE, scenarios=("parameters_on_host", "host_stage3_bf16", "fraction_clip"))
def _no_wait_for_gradients_that_land(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """A step reads gradients on the host while they are still copied there."""
    patch.setattr(HostGradients, "follow", lambda store: None)


@_must_show(
    Kind.RACE,
    scenarios=(
        "host_read_in_backward",
        "host_backward_fails",
        "parameters_on_host_gradients_read_once",
        "host_gradients_are_held",
    ),
)
def _no_wait_for_a_look(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Somebody reads values that a backward has stepped, or its gradients, before they are at rest."""
    patch.setattr(LateSteps, "wait_later", lambda late, wait: True)


@_must_show(Kind.RACE, scenarios=("files_stage3", "files_read_in_backward"))
def _files_are_written_before_their_values_come(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Values are written to files while they are still copied from the device."""
    write = Swap.write
    patch.setattr(Swap, "write", lambda swap, values, memory, *_: write(swap, values, memory))


@_must_show(Kind.RACE, scenarios=("files_stage3",))
def _no_wait_for_transfers(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The optimizer steps values while they are read from files, and changes them while they are written."""
    synchronize = Event.synchronize

    def synchronizes(event: Event) -> None:
        if event.stream is None or not event.stream.name.startswith("transfer"):
            synchronize(event)

    patch.setattr(Event, "synchronize", synchronizes)


@_must_show(Kind.REUSE, scenarios=("offloaded_in_vain",))
def _no_wait_for_copies_that_nobody_needs(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Activations that came back in vain are freed while they are copied to the device."""
    die = SavedMemory.__del__

    def dies(memory: SavedMemory) -> None:
        memory._mark = None
        die(memory)

    patch.setattr(SavedMemory, "__del__", dies)


@_must_show(Kind.FREED, scenarios=("host_dropped",))
def _no_wait_at_the_end(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """An engine goes, and the memory of the host with it, while copies are under way."""
    patch.setattr(runtime, "mark_here", lambda device: Mark(None))
    patch.setattr(MainStore, "await_copies", lambda buffer: None)
    patch.setattr(HostGradients, "wait", lambda store: None)


# -- orders --------------------------------------------------------------------------------------------------


class _Late:
    """A collective that is issued later than it was asked for, on the stream that was current then."""

    def __init__(self, bench: Bench, issue: Callable[[], Handle]) -> None:
        self._timeline, self._issue = bench.trace.timeline, issue
        self._stream = self._timeline.current
        self._handle: Handle | None = None

    def issue(self) -> None:
        if self._handle is None:
            here = self._timeline.current
            is_other = here is not self._stream
            with self._stream if is_other else contextlib.nullcontext():
                self._handle = self._issue()

    def wait(self) -> None:
        self.issue()
        assert self._handle is not None, "it has been issued"
        self._handle.wait()


def _hold_back(bench: Bench, patch: pytest.MonkeyPatch, behind: str, every: int = 1) -> None:
    """On rank 1 a gather is issued behind the next call of another method, or when somebody waits for it.

    The comparison of ledgers, which would end the scenario with an error, is switched off.
    """
    patch.setattr(Ledger, "proof", lambda ledger: [])
    if bench.rank != 1:
        return
    held: list[_Late] = []
    number = 0
    gather, other = Axis.all_gather, getattr(Axis, behind)

    def gathers(axis: Axis, *args: Any, **kwargs: Any) -> Handle:
        nonlocal number
        if kwargs.get("channel", GATHER) != GATHER:  # a half of an all-reduce
            return gather(axis, *args, **kwargs)
        number += 1
        if number % every == 0 and axis.size > 1:
            held.append(_Late(bench, lambda: gather(axis, *args, **kwargs)))
            return held[-1]
        return gather(axis, *args, **kwargs)

    def passes(axis: Axis, *args: Any, **kwargs: Any) -> Any:
        waiting, held[:] = held[:], []
        result = (gathers if behind == "all_gather" else other)(axis, *args, **kwargs)
        for late in waiting:
            late.issue()
        return result

    patch.setattr(Axis, "all_gather", gathers)
    patch.setattr(Axis, behind, passes)


@_must_show(Kind.ORDER, scenarios=("stage3_prefetch3", "second_copy"))
def _another_order(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """One rank gathers two units in the other order."""
    _hold_back(bench, patch, behind="all_gather", every=7)


def _one_communicator_for_both(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mesh, "_shard_subgroup", lambda purpose, axes, size: axes.dp_shard.groups[GATHER])


@_must_show(Kind.UNORDERED, scenarios=("stage3",))
def _one_communicator(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Gathers and reductions share a communicator, from two streams."""
    _one_communicator_for_both(patch)


@_must_show(Kind.UNORDERED, scenarios=("tensor_stage1",))
def _one_communicator_for_activations(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Activations and sums of gradients over the tensor ranks share a communicator, from two streams."""
    open_group = mesh.open_group

    def opened(purpose: str, *args: Any) -> Any:
        return open_group("tp" if purpose == "activations" else purpose, *args)

    patch.setattr(mesh, "open_group", opened)


@_must_show(Kind.ORDER, scenarios=("stage3",))
def _one_communicator_two_orders(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Gathers and reductions share a communicator, and one rank reduces before it gathers."""
    _one_communicator_for_both(patch)
    _hold_back(bench, patch, behind="reduce_scatter")


@_must_show(Kind.CYCLE, scenarios=("stage3",))
def _cycle(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Each collective waits for the one issued before, whatever its communicator; one rank reduces first."""
    timeline = bench.trace.timeline
    last: list[Stream] = []

    def in_line(method: Callable[..., Handle]) -> Callable[..., Handle]:
        def called(*args: Any, **kwargs: Any) -> Handle:
            if last:
                timeline.current.wait_stream(last[-1])
            last[:] = [timeline.current]
            return method(*args, **kwargs)

        return called

    for name in ("all_gather", "reduce_scatter"):
        patch.setattr(Axis, name, in_line(getattr(Axis, name)))
    _hold_back(bench, patch, behind="reduce_scatter")


@_must_show(scenarios=("stage3",))
def _interleaved(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """One rank reduces before it gathers, over two communicators: that is no mistake."""
    _hold_back(bench, patch, behind="reduce_scatter")
