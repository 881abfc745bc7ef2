"""Main parameters, gradients and optimizer states on the host or in files; all values are as without it."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import adam

from tests.pretend.scenario import Bench, MakeOptimizer, adamw, add, scenario
from tests.pretend.scenarios.plain import BF16, BF16_MAIN
from tests.stepping.late import stepped_late
from zeroshard.comm import moves
from zeroshard.comm.streams import Mark
from zeroshard.optim import LAMB, AdamW8bit
from zeroshard.optim.eightbit import rules, step
from zeroshard.plan import pieces
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.unit import Unit
from zeroshard.stepping.parts import is_known, steps_by_unit
from zeroshard.stores.pieces import HostPieces

HOST, FILES = {"optimizer": "cpu"}, {"optimizer": "nvme"}
READS_FACTOR = ("stepping/clipping.py",)
"""The host waits for the norm: it scales gradients that lie there, which are read or stepped at once."""
NEW_STATES = ("stepping/parts.py",)
"""The host waits until new states of a piece are at rest."""

Train = Callable[[Bench], list[Tensor]]
"""Returns losses."""


def plainly(bench: Bench) -> list[Tensor]:
    return bench.train(3)


def _values(
    bench: Bench, model: nn.Module, train: Train, optimizer: MakeOptimizer, config: dict[str, Any]
) -> list[Tensor]:
    torch.manual_seed(1)
    engine = bench.start(copy.deepcopy(model), optimizer, **config)
    losses = train(bench)
    with bench.trace.syncs_allowed():
        return losses + [value.clone() for value in engine.full_state_dict().values()]


def _check_places(bench: Bench, offload: dict[str, Any]) -> None:
    """States rest where the plan says; main parameters in the dtype of the computation may stay."""
    engine, trace = bench.engine, bench.trace
    for buffer in (b for b in engine._runtime.buffers if b.trainable and b.main.numel()):
        plan = buffer.plan
        for state in (state for p in buffer.sharded for state in engine.optimizer.state[p].values()):
            if isinstance(state, Tensor) and state.dim() and state.numel():
                assert trace.is_on_host(state) is (plan.state_tier is Tier.HOST)
        stays = plan.main_dtype == plan.compute_dtype and "parameters" not in offload
        assert trace.is_on_host(buffer.main) is (plan.main_tier is Tier.HOST)
        if plan.state_tier is Tier.HOST and "device_fraction" not in offload:
            assert trace.is_on_host(buffer.main) is not (stays and is_known(engine.optimizer))


def _add(
    name: str,
    offload: dict[str, Any],
    train: Train = plainly,
    *,
    optimizer: MakeOptimizer = adamw,
    num_ranks: int = 2,
    near_bytes: int = pieces.NEAR_BYTES,
    may_sync: Iterable[str] = (),
    **config: Any,
) -> None:
    """A scenario that trains a language model with offload, and then without on the CPU: values are the same.

    Its stage is 3, and it computes in bfloat16, if nothing else is said.
    """
    config = {"stage": 3, "precision": BF16} | config
    is_in_files, is_early = "nvme" in offload.values(), "step_in_backward" in offload
    frees = config["stage"] == 3 or num_ranks == 1  # else all parameters are gathered after a step
    is_late = frees and not is_early and train not in AT_ONCE

    @contextmanager
    def patched() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pieces, "NEAR_BYTES", near_bytes)
            patch.setattr(step, "_has_numba", lambda: False)  # numba, which steps on a CPU
            patch.setattr(rules, "root", torch.sqrt)  # the exact one of CPUs goes through NumPy
            yield

    def run(bench: Bench) -> None:
        model = bench.gpt(4 if is_in_files or is_early else 2)  # more units than pieces of memory
        tiers = offload | ({"nvme_path": str(bench.folder)} if is_in_files else {})
        with patched(), stepped_late() as names:
            moved = _values(bench, model, train, optimizer, config | {"offload": tiers})
        assert "to_host" in {stream for stream, _ in bench.trace.kernels}, "gradients leave the device"
        made, context = bench.engine.optimizer, bench.engine._runtime.context
        assert bool(context.memory.piece_bytes) is is_known(made), "who steps"
        assert bool(names) is (is_late and steps_by_unit(made, context.axes)), names
        if not is_in_files:
            _check_places(bench, offload)

        def plain() -> list[Tensor]:
            with patched():
                return _values(bench, model, train, optimizer, config)

        bench.compare_later(moved, plain)

    syncs = NEW_STATES if near_bytes < pieces.NEAR_BYTES else ()
    add(name, run, num_ranks=num_ranks, may_sync=(*may_sync, *syncs, *SYNCS.get(train, ())))


def _clipped(bench: Bench) -> list[Tensor]:
    """Gradients are scaled where they are stepped, and before anybody reads them or adds to them."""
    engine, read = bench.engine, []
    for number in range(6):
        loss = bench.loss(number)
        loss.backward()
        read += [loss.detach(), engine.clip_grad_norm_(0.01)]
        if number == 1:
            read += _gradients(bench)
        elif number == 2:
            read.append(engine.clip_grad_norm_(0.005))
        elif number == 3:
            bench.loss(10).backward()
        engine.optimizer.step()
        if number == 4:
            read += _gradients(bench)
        engine.optimizer.zero_grad()
    return read


def _gradients(bench: Bench) -> list[Tensor]:
    with bench.trace.syncs_allowed():
        return [
            moves.to_device(p.grad, torch.device(bench.engine.device)).clone()
            for p in bench.engine.parameters()
            if p.grad is not None
        ]


def _in_batches(bench: Bench) -> list[Tensor]:
    """Batches are stepped in their backward, but for the first backward of all."""
    engine, early = bench.engine, bench.engine._early
    engine.loss_fn = lambda logits, tokens: F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    num = engine.gradient_accumulation_steps()
    tokens = [torch.cat([bench.tokens(4 * step + piece) for piece in range(num)]) for step in range(4)]
    if early is None:
        return [engine.train_batch(batch, batch) for batch in tokens]
    with mock.patch.object(early, "_step", side_effect=early._step) as stepped:
        losses = [engine.train_batch(tokens[0], tokens[0])]
        assert stepped.called is (num > 1), "the first backward steps nothing"
        stepped.reset_mock()
        losses += [engine.train_batch(batch, batch) for batch in tokens[1:]]
        assert stepped.call_count == 3 * sum(bool(unit.gradients) for unit in engine._runtime.units)
    return losses


def _edited(bench: Bench) -> list[Tensor]:
    """Parameters are edited between steps and forwards, and between a backward and its step.

    Then the copies for gathers are those of before the edit, and the next step comes first.
    """
    losses = []

    def scale() -> None:
        with torch.no_grad():
            for parameter in bench.engine.parameters():
                parameter.mul_(0.9)

    for number in range(2):
        losses += bench.train(1)
        scale()
        losses.append(bench.loss(number).detach())
        scale()
        losses.append(bench.loss(number))
        bench.engine.backward(losses[-1])
        scale()
        bench.engine.step()
    return [loss.detach() for loss in losses]


def _shown(bench: Bench) -> list[Tensor]:
    losses = []
    for number in range(2):
        bench.engine.backward(bench.loss(number))
        with bench.engine.unsharded(write_back=True), torch.no_grad():
            bench.engine.module.blocks[0].mlp[0].weight.mul_(0.5)
            losses += [parameter.sum() for parameter in bench.engine.parameters()]
        bench.engine.step()
        with bench.engine.unsharded(write_back=True), torch.no_grad():
            bench.engine.module.blocks[0].mlp[0].weight.mul_(0.5)
        losses += [parameter.clone().sum() for parameter in bench.engine.parameters()]
        losses.append(bench.loss(number).detach())
    return losses


def _saved(bench: Bench) -> list[Tensor]:
    folder = bench.folder / ("moved" if bench.engine.config.offload.optimizer != "none" else "plain")
    losses = bench.train(1)
    bench.engine.save_checkpoint(folder, blocking=False)
    losses += bench.train(2)
    bench.engine.load_checkpoint(folder)
    return losses + bench.train(1)


def _interrupted(bench: Bench) -> list[Tensor]:
    """A step fails in the second piece of a parameter; a checkpoint is loaded, and training goes on."""
    if bench.engine.config.offload.optimizer == "none":
        return plainly(bench)
    losses, step, seen = bench.train(1), adam.adam, set[int]()

    def fail(parameters: list[Tensor], *args: Any, **kwargs: Any) -> None:
        if id(parameters[0]) in seen:
            raise ArithmeticError("in a piece")
        seen.update(map(id, parameters))
        step(parameters, *args, **kwargs)

    bench.engine.save_checkpoint(bench.folder)
    if bench.engine.config.offload.step_in_backward:  # else steps would not wait any more
        bench.engine.optimizer.state.clear()
    bench.engine.load_checkpoint(bench.folder)  # new states are at no place that is read ahead
    with mock.patch.object(adam, "adam", fail), pytest.raises(ArithmeticError):
        bench.train(2)  # the first step may wait for the second forward
    bench.engine.load_checkpoint(bench.folder)
    for number in (1, 2):
        losses.append(bench.loss(number).detach())
        bench.engine.backward(bench.loss(number))
        bench.engine.step()
    return losses


def _in_a_plain_loop(bench: Bench) -> list[Tensor]:
    """Steps of the optimizer, with gradients that are the engine's own copies on one rank."""
    losses = []
    for number in range(4):
        loss = bench.loss(number)
        loss.backward()
        bench.engine.optimizer.step()
        bench.engine.optimizer.zero_grad(set_to_none=number != 1)
        losses.append(loss.detach())
    return losses


def _gradients_read_once(bench: Bench) -> list[Tensor]:
    """The first step does not wait, since somebody may hold its gradients; later ones do."""
    loss = bench.loss(0)
    bench.engine.backward(loss)
    seen = [p.grad.sum() for p in bench.engine.parameters() if p.grad is not None]
    bench.engine.step()
    return [loss.detach(), *seen, *plainly(bench)]


def _looked_at(bench: Bench) -> list[Tensor]:
    """Between a step and the next forward somebody looks at values, or changes options."""
    engine, optimizer = bench.engine, bench.engine.optimizer
    seen = []

    def near(state: Tensor) -> Tensor:
        return moves.to_device(state, state.device).clone()

    def look(number: int) -> None:
        *_, parameter = engine.parameters()
        if number == 0:
            seen.append(parameter.norm())
        elif number == 1:
            optimizer.param_groups[0]["lr"] *= 0.5
            bench.evaluate()
        elif number == 2:
            with engine.unsharded(), torch.no_grad():
                seen.extend(p.sum() for p in engine.parameters())
        elif number == 3:
            states = optimizer.state_dict()["state"].values()
            seen.extend(near(state["exp_avg"]) for state in states)
        elif number == 4:
            bench.loss(0)  # a graph without a backward
            with torch.no_grad():
                parameter.mul_(0.5)
        elif number == 5:
            seen.append(parameter.detach())  # from now on no step waits
        elif number == 6:
            seen.append(near(optimizer.state[parameter]["exp_avg"]))

    for number in range(8):
        seen += bench.train(1)
        look(number)
    return seen


def _evaluated(bench: Bench) -> list[Tensor]:
    """Units are gathered between backward and step, some of them with their new values."""
    losses = []
    for number in range(3):
        loss = bench.loss(number)
        bench.engine.backward(loss)
        bench.evaluate()
        bench.engine.step()
        losses.append(loss.detach())
    return losses


def _with_readers(bench: Bench) -> list[Tensor]:
    """A hook in the backward computes with a unit that has had its step there, or is being stepped.

    Units are gathered between backward and step, too.
    """
    model = bench.engine.module
    first, handed_over = model.blocks[0], model.blocks[2]  # the last one that is handed over until then

    def read(gradient: Tensor) -> None:
        with torch.no_grad():
            handed_over(gradient)

    def hook(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            args[0].register_hook(read)

    handle = first.register_forward_pre_hook(hook)
    losses = _evaluated(bench)
    handle.remove()
    return losses


def _frozen_for_a_step(bench: Bench) -> list[Tensor]:
    """A unit with a parameter without a gradient is stepped after the backward."""
    bias = bench.engine.module.blocks[1].mlp[0].bias
    losses = bench.train(1)
    bias.requires_grad_(False)
    losses += bench.train(2)
    bias.requires_grad_(True)
    return losses + bench.train(1)


def _fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _lamb(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return LAMB(parameters, lr=1e-3)


_EARLY = {"step_in_backward": True}
_WHOLE = {"parameters": "cpu", **HOST}
_FRACTION = {**HOST, "device_fraction": 0.5}
AT_ONCE = (_shown,)
"""Trainings in which no unit is stepped in a forward."""
SYNCS = {
    _clipped: READS_FACTOR,
    _saved: ("zeroshard/checkpoint/",),
    _interrupted: ("zeroshard/checkpoint/",),
    _shown: ("full/parameters.py", "sharding/buffer.py(write)"),
    _looked_at: ("full/parameters.py", "sharding/buffer.py(write)"),
    _edited: ("pretend/scenarios/tiers.py",),
}
"""Where the host may wait for the device in a training."""

_add("host_stage1_bf16", HOST, stage=1)
_add("host_stage3", HOST, precision={})
_add("host_stage3_bf16", HOST)
_add("host_clip_accumulate", _WHOLE, precision=BF16_MAIN, gradient_accumulation_steps=2, clip_grad_norm=0.01)
_add("fraction_clip", _FRACTION, clip_grad_norm=0.01)
_add("parameters_on_host", _WHOLE, precision={})
_add("files_stage1", FILES, stage=1)
_add("files_stage3", FILES, precision={})
_add("files_stage3_clip", {**FILES, "parameters": "cpu"}, precision=BF16_MAIN, clip_grad_norm=0.01)
_add("host_edited", HOST, _edited)
_add("parameters_on_host_edited", _WHOLE, _edited)
_add("parameters_on_host_shown", _WHOLE, _shown)
_add("parameters_on_host_saved", _WHOLE, _saved)
_add("files_saved", FILES, _saved)
_add("host_edited_stage1", HOST, _edited, stage=1)
_add("host_saved_stepped_in_backward", HOST | _EARLY, _saved, optimizer=_fused)
_add("host_plain_loop", HOST, _in_a_plain_loop, num_ranks=1, precision={})
_add("host_looked_at", HOST, _looked_at, precision=BF16_MAIN, near_bytes=4096)
for _ranks in (1, 2):
    _add(f"host_batches_{_ranks}", HOST, _in_batches, num_ranks=_ranks, precision=BF16_MAIN)
_add("parameters_on_host_frozen_for_a_step", _WHOLE | _EARLY, _frozen_for_a_step, precision=BF16_MAIN)
_add("files_batches", FILES, _in_batches)
_add(
    "parameters_on_host_gradients_read_once",
    _WHOLE,
    _gradients_read_once,
    precision=BF16_MAIN,
    near_bytes=4096,
)
_add("parameters_on_host_clipped", _WHOLE, _clipped)
_add("host_lamb_alone", HOST, optimizer=_lamb, num_ranks=1, may_sync=("optim/layerwise.py",))

# -- steps in the backward -----------------------------------------------------------------------------------

_add("files_read_in_backward", FILES | {"parameters": "cpu"} | _EARLY, _with_readers)
_add("stepped_in_backward_evaluated", FILES | _EARLY, _evaluated)
_add("host_stepped_in_backward", HOST | _EARLY, _with_readers)
_add("host_stepped_in_backward_one_rank", HOST | _EARLY, num_ranks=1, precision=BF16_MAIN)
_add(
    "parameters_on_host_stepped_in_backward",
    _WHOLE | _EARLY,
    precision=BF16_MAIN,
    gradient_accumulation_steps=2,
)
_add("fraction_stepped_in_backward", _WHOLE | {"device_fraction": 0.3} | _EARLY, _saved, precision=BF16_MAIN)

# -- steps in pieces -----------------------------------------------------------------------------------------

_add("parameters_on_host_in_pieces", _WHOLE, near_bytes=2048)
_add("parameters_on_host_in_pieces_edited", _WHOLE, _edited, near_bytes=2048)
_add("host_in_pieces", HOST, _saved, near_bytes=2048, clip_grad_norm=0.01)
_add("files_in_pieces_stepped_in_backward", FILES | {"parameters": "cpu"} | _EARLY, near_bytes=2048)
_add("host_in_pieces_stepped_in_backward", HOST | _EARLY, optimizer=_fused, near_bytes=2048)
_add("host_in_pieces_interrupted", HOST, _interrupted, near_bytes=2048)
_add("host_in_pieces_interrupted_in_backward", HOST | _EARLY, _interrupted, near_bytes=2048)
_add(
    "host_8bit",
    HOST | _EARLY,
    _saved,
    optimizer=lambda p: AdamW8bit(p, 1e-3, min_8bit_size=512),
    near_bytes=1024,
    precision=BF16_MAIN,
    may_sync=("zeroshard/optim/eightbit/",),
)


@scenario(num_ranks=1)
def host_waits_for_nothing(bench: Bench) -> None:
    """Once there are states, no step lets the host wait, until a look."""
    clipped = ("cpu", None, 0.01)
    for parameters, early, limit in (*itertools.product(("none", "cpu"), (None, True), (None,)), clipped):
        offload = {**HOST, "parameters": parameters, "step_in_backward": early}
        bench.start(bench.gpt(3), stage=3, precision=BF16_MAIN, offload=offload, clip_grad_norm=limit)
        bench.train(2)
        with _host_waits() as waits, _fetched_alone(bench) as alone:
            bench.train(2)
            assert not waits, (parameters, early, limit, waits)
            assert not alone, (parameters, early, alone)
            with bench.trace.syncs_allowed():
                next(iter(bench.engine.parameters())).norm()
            assert "pieces.py" in waits


@scenario(num_ranks=1, may_sync=("stores/pieces.py", "stores/store.py"))
def host_gradients_are_held(bench: Bench) -> None:
    """Gradients that somebody holds are written after a step, and read after a backward that adds to them."""
    engine = bench.start(bench.gpt(3), stage=3, precision=BF16_MAIN, offload=_WHOLE)
    bench.train(2)
    for number in range(3):
        bench.loss(number).backward()
        with bench.trace.syncs_allowed():
            held = [p.grad for p in engine.parameters()]
        if number != 1:
            engine.optimizer.step()
            for gradient in held:
                gradient.zero_()
    bench.loss(4).backward()
    assert all(gradient.isfinite().all() for gradient in held)


@contextmanager
def _fetched_alone(bench: Bench) -> Iterator[list[torch.Size]]:
    """The shapes of what is copied from the host by itself, on the stream of compute, before a step."""
    shapes: list[torch.Size] = []

    def noted(pieces: HostPieces, value: Tensor, near: Callable[..., Tensor] = HostPieces.near) -> Tensor:
        shapes.extend([value.shape] * (value.dim() > 0 and bench.trace.is_on_host(value)))
        return near(pieces, value)

    with mock.patch.object(HostPieces, "near", noted):
        yield shapes


@contextmanager
def _host_waits() -> Iterator[list[str]]:
    """The files from which the host waits for the device."""
    waits: list[str] = []

    def noted(mark: Mark, synchronize: Callable[[Mark], None] = Mark.synchronize) -> None:
        if mark.event is not None:
            waits.append(Path(sys._getframe(1).f_code.co_filename).name)
        synchronize(mark)

    with mock.patch.object(Mark, "synchronize", noted):
        yield waits


@scenario()
def host_read_in_backward(bench: Bench) -> None:
    """A hook in the backward reads main parameters that were stepped there, and are on their way back."""
    offload = {**_WHOLE, **_EARLY}
    bench.start(bench.gpt(5), stage=3, precision=BF16_MAIN, offload=offload)
    blocks, seen = bench.engine.module.blocks, []

    def read(gradient: Tensor) -> None:
        with bench.trace.syncs_allowed():
            seen.append([p.norm() for p in blocks[4].parameters()])

    def hook(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            args[0].register_hook(read)

    for block in blocks[:2]:
        block.register_forward_pre_hook(hook)
    bench.train(3)
    with bench.trace.syncs_allowed():
        held = blocks[0].mlp[0].bias.detach()  # from now on somebody may look unseen
    bench.train(2)
    assert len(seen) == 10, held


@scenario(may_sync=SYNCS[_saved])
def host_backward_fails(bench: Bench) -> None:
    """A hook ends a backward that has stepped units, with values on their way; a checkpoint is loaded."""
    bench.start(bench.gpt(5), stage=3, precision=BF16_MAIN, offload={**_WHOLE, **_EARLY})
    bench.train(2)
    bench.engine.save_checkpoint(bench.folder)

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("in a hook")

    first = bench.engine.module.blocks[0]
    handle = first.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(ArithmeticError):
        bench.train(1)
    handle.remove()
    bench.engine.load_checkpoint(bench.folder)
    bench.train(2)


def _main_is_read_where_it_is_gathered(bench: Bench) -> None:
    """Steps in the backward take main parameters of bf16 from the gathered ones: they travel once."""
    bench.start(bench.gpt(5), stage=3, precision=BF16_MAIN, offload=_WHOLE | _EARLY)
    bench.train(2)
    found, followed, own = [], [], Unit.lend

    def noted(unit: Unit, buffer: FlatBuffer, follow: Callable[[], None]) -> Tensor | None:
        found.append(own(unit, buffer, lambda: note_streams(follow)))
        return found[-1]

    def note_streams(follow: Callable[[], None]) -> None:
        def wait(mark: Mark, wait: Callable[[Mark], None] = Mark.wait) -> None:
            followed.append(mark.event.stream.name if mark.event is not None else "")
            wait(mark)

        with mock.patch.object(Mark, "wait", wait):
            follow()

    with mock.patch.object(Unit, "lend", noted):
        bench.train(1)
    assert set(followed) == {"to_device"}, "a unit is freed while its stepped values go to the host"
    assert sum(one is not None for one in found) >= 4, "of 5 blocks, all but the first in the backward"


add("main_read_where_gathered", _main_is_read_where_it_is_gathered, num_ranks=1)


@scenario(num_ranks=1)
def host_one_unit(bench: Bench) -> None:
    """Each step reads the states that the last one has just written: there are more pieces than units."""
    for early in ({}, _EARLY):
        model = bench.gpt(0)
        bench.start(model, stage=3, precision=BF16_MAIN, offload=HOST | early)
        bench.train(3)


@scenario()
def host_dropped(bench: Bench) -> None:
    """Engines go while copies from and to the host are under way; one is closed, and another one goes on."""
    for parameters in ("none", "cpu"):
        bench.start(bench.gpt(2), stage=3, offload={**HOST, "parameters": parameters})
        bench.train(2)
        bench.engine.backward(bench.loss(0))
        bench.loss(1)
        bench.engine = None
        gc.collect()
        bench.start(bench.gpt(2), stage=3, offload={**HOST, "parameters": parameters})
        bench.train(2)
        bench.loss(1)  # states go back to the host
        bench.engine = None
        gc.collect()
    model = bench.gpt(2)
    for number in range(2):
        bench.start(model, stage=1, precision=BF16, offload=HOST)
        bench.train(2, 2 * number)
        bench.engine.close()
