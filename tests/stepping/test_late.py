"""Steps that wait for the next forward have the bits of steps at once, whoever looks in between."""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import os
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import zeroshard
from tests.checkpoint import runs
from tests.ranks import on_ranks
from tests.stepping.late import waiting
from tests.stores.tiers import BF16, BF16_MAIN, OPTIMIZERS, over
from zeroshard.stepping.late import LateSteps
from zeroshard.stepping.parts import StepByParts
from zeroshard.stores.pieces import HostPieces

MAKERS = OPTIMIZERS | {"of a tensor": lambda model: over(torch.optim.AdamW, lr=torch.tensor(1e-2))(model)}
TOGETHER = ("LAMB", "LARS", "Muon")
"""Optimizers whose step asks all ranks, so it waits for a forward on one rank alone."""


def last(engine):
    return [p for p in engine.parameters() if p.numel()][-1]


def do_nothing(*_):
    pass


def change_rate(engine, _):
    engine.optimizer.param_groups[0]["lr"] *= 0.5


def evaluate(engine, seen):
    with torch.inference_mode():
        seen.append(runs.token_loss(engine, 100).item())


def compute_in_autocast(engine, seen):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        seen.append(runs.token_loss(engine, 100).item())


def leave_a_graph(engine, seen):
    seen.append(runs.token_loss(engine, 100))


def fail_in_a_forward(engine, _):
    def fail(*_):
        raise KeyError("of the user")

    handle = engine.module.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        runs.token_loss(engine, 0)
    handle.remove()


def read_parameter(engine, seen):
    seen.append(sum(p.norm().item() for p in engine.parameters()))


def edit_parameter(engine, _):
    with torch.no_grad():
        for p in engine.parameters():
            p.mul_(0.9)


def tensors_of(states):
    return [value.clone() for state in states for value in state.values() if torch.is_tensor(value)]


def read_state(engine, seen):
    seen += tensors_of(list(engine.optimizer.state.values()))


def read_state_dict(engine, seen):
    seen += tensors_of(engine.optimizer.state_dict()["state"].values())


def read_whole(engine, seen):
    with engine.unsharded():
        seen += [p.detach().clone() for p in engine.module.parameters()]


def read_text(engine, seen):
    seen += [len(engine.optimizer.state), copy.copy(engine.optimizer.state) != {}]
    seen.append(torch.tensor(list(repr(last(engine)).encode())))


def step_again(engine, _):
    engine.optimizer.step()


def clear_states(engine, _):
    engine.optimizer.state.clear()


def load_no_states(engine, _):
    groups = engine.optimizer.param_groups
    groups = [group | {"params": list(range(len(group["params"])))} for group in groups]
    engine.optimizer.load_state_dict({"state": {}, "param_groups": groups})


def read_memory(engine, seen):
    places = [(p.data_ptr(), p.untyped_storage()) for p in engine.parameters() if p.numel()]
    seen += [torch.tensor(list(ctypes.string_at(place, 4))) for place, _ in places]


UNSEEN = (change_rate, evaluate, compute_in_autocast, leave_a_graph, fail_in_a_forward, do_nothing)
LOOKS = (read_parameter, edit_parameter, read_state, read_state_dict, read_whole, read_text, step_again)
LOOKS += (clear_states, read_parameter, load_no_states, read_memory, read_memory, do_nothing)
"""The second `read_memory` finds that no step waits any more."""
LOOPS_OF_ENGINES = {
    "unseen": (UNSEEN, "of a tensor", {}, 5),
    "unseen, bf16": (UNSEEN, "fused", BF16, 5),
    "unseen, 8 bits": (UNSEEN, "8-bit", BF16_MAIN, 5),
    "looks": (LOOKS, "AdamW", {}, 0),
    "looks, bf16": (LOOKS, "fused", BF16, 0),
    "looks, 8 bits": (LOOKS, "8-bit", BF16_MAIN, 0),
    "sgd": (UNSEEN[:2], "SGD", BF16_MAIN, 2),
    "lamb": (UNSEEN[:3], "LAMB", BF16_MAIN, 3),
    "lars": (UNSEEN[:3], "LARS", {}, 3),
    "muon": (UNSEEN[:3], "Muon", BF16_MAIN, 3),
    "muon, looks": ([read_parameter] * 3, "Muon", {}, 0),
    "accumulated": ([change_rate] * 6, "AdamW", {"gradient_accumulation_steps": 3}, 1),
    "clipped": (UNSEEN[:3], "fused", {"clip_grad_norm": 0.01}, 3),
}
"""By name: what happens after each micro-batch, the optimizer, the config, and how many steps end in
forwards, each over 3 units."""
QUICK = ("unseen", "unseen, 8 bits", "looks", "looks, 8 bits", "lamb", "accumulated", "clipped")


def trained(is_late, start, loop, num):
    """The state at the end, what the loop has kept, and how many units were stepped in forwards."""
    with waiting(is_late) as names:
        torch.manual_seed(0)
        engine, kept = start(), []
        losses = [loop(engine, number, kept) for number in range(num)]
        in_forwards = len(names)
        found = runs.state(engine, losses)
        engine.close(restore=False)
    return found, [torch.as_tensor(one) for one in kept], in_forwards


def differ(name, start, start_late, loop, num, waits):
    """Differences between steps at once and steps that wait: in so many units, or in some or none."""
    want, kept_at_once, at_once = trained(False, start, loop, num)
    got, kept, in_forwards = trained(True, start_late, loop, num)
    found = runs.differences(got, want) + ["losses"] * (repr(got.losses) != repr(want.losses))
    found += ["what was kept"] * (
        not all(torch.equal(*pair) for pair in zip(kept, kept_at_once, strict=True))
    )
    num_units = bool(in_forwards) if isinstance(waits, bool) else in_forwards
    found += [f"{in_forwards} units in forwards, {at_once} at once"] * (num_units != waits or at_once > 0)
    return [f"{name}: {text}" for text in found]


@pytest.mark.parametrize(
    ("num_ranks", "parameters"),
    [
        (2, None),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, None), (1, "none"), (2, "nvme"))),
    ],
)
@on_ranks(timeout=300)
@runs.without_numba
def test_steps_that_wait_have_the_bits_of_steps_at_once(tmp_path, num_ranks, parameters):
    """Also those that wait for values in files."""
    files = {"offload": {"optimizer": "nvme", "parameters": parameters, "nvme_path": str(tmp_path)}}
    found = []
    for name in LOOPS_OF_ENGINES if os.environ.get("ALL_STAGES") and parameters is None else QUICK:
        looks, make, config, num_steps = LOOPS_OF_ENGINES[name]

        def loop(engine, number, seen, looks=looks):
            (loss,) = runs.train(engine, [number], runs.token_loss)
            looks[number](engine, seen)
            return loss

        start = partial(runs.start, {"stage": 3} | config, MAKERS[make])
        start_late = partial(runs.start, {"stage": 3} | config | (files if parameters else {}), MAKERS[make])
        waits = 0 if make in TOGETHER and num_ranks > 1 else 3 * num_steps
        found += differ(name, start, start_late, loop, len(looks), waits)
    return found


# ------------------------------------------------------------------------------------ what is held outside


def gradients(engine):
    return [p.grad for p in engine.parameters() if p.grad is not None]


def views(engine):
    with torch.no_grad():
        return [p[:1] for p in engine.parameters() if p.numel()]


HOLDS = {
    "nothing": lambda engine: [],
    "gradients": gradients,
    "memory": lambda engine: [p.data for p in engine.parameters()],
    "views": views,
    "states": lambda engine: [v for state in engine.optimizer.state.values() for v in state.values()],
    "state dict": lambda engine: [
        value for state in engine.optimizer.state_dict()["state"].values() for value in state.values()
    ],
}


@on_ranks(2)
def test_no_step_waits_once_somebody_may_look_unseen():
    """A loop of the user's own, who holds tensors from before the steps, and reads or changes them after."""
    found = []
    for hold, get in HOLDS.items():

        def loop(engine, number, seen, hold=hold, get=get):
            engine.backward(runs.token_loss(engine, number))
            held = get(engine)
            engine.optimizer.step()
            with torch.no_grad():
                seen += [value.clone() for value in held]
                for value in held if hold == "gradients" else ():
                    value.zero_()
            engine.zero_grad(set_to_none=number != 1)

        start = partial(runs.start, {"stage": 3}, OPTIMIZERS["AdamW"])
        found += differ(hold, start, start, loop, 3, hold == "nothing")
    return found


# ------------------------------------------------------------------------------------ loops of the user's


def kept_gradients(engine, number, kept):
    """The loop of somebody who clears gradients by references from the first backward."""
    loss = runs.token_loss(engine, number)
    engine.backward(loss)
    kept += gradients(engine) if not kept else []
    engine.optimizer.step()
    for gradient in kept:
        gradient.zero_()
    return loss.item()


class Pair(torch.nn.Module):
    """Every second forward leaves a unit out, which is stepped before the next backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x):
        return self.first(x) if x.max() % 2 == 1 else self.second(self.first(x))


class Selective(Pair):
    """Checkpoints that keep results of functions which an optimizer calls as well."""

    def forward(self, x):
        for layer in (self.first, self.second):
            keeps = partial(create_selective_checkpoint_contexts, [torch.ops.aten.div.Tensor])
            x = checkpoint(
                lambda y, layer=layer: (layer(y) / 2).tanh(), x, use_reentrant=False, context_fn=keeps
            )
        return x


def of_the_engine(engine, number, _):
    loss = engine(torch.ones(2, 8) * number).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


class Shift(torch.nn.Module):
    """Its gradient is a view of the gradient of its output."""

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.ones(4, 8))

    def forward(self, x):
        return x + self.shift.unsqueeze(0)


def own_gradient(engine, number, kept):
    """A gradient that comes from elsewhere, in memory that is used again."""
    kept += [torch.empty(1, 4, 8)] if not kept else []
    out = engine(torch.ones(1, 4, 8))
    out.backward(kept[0].fill_(number - 1.5))
    engine.step()
    kept[0].fill_(9.0)
    return out.sum().item()


def kept_by_a_hook(engine, number, kept):
    """A hook keeps the gradient of an output, of which the gradient of a parameter is a view."""
    out = engine(torch.ones(1, 4, 8))
    out.register_hook(lambda gradient: kept.append(gradient))
    engine.backward((out * (number - 1.5)).sum())
    engine.step()
    kept[-1].fill_(9.0)
    return out.sum().item()


def own_nan(engine, number, kept):
    """A gradient that is not finite, in a loop that leaves out its step."""
    out = engine(torch.ones(1, 4, 8))
    gradient = torch.full((1, 4, 8), math.nan if number == 1 else number - 1.5)
    out.backward(gradient)
    kept.append(engine.step())
    gradient.fill_(9.0)
    return out.sum().item()


def plainly(engine, number, _):
    loss = runs.token_loss(engine, number)
    loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return loss.item()


def with_a_closure(engine, number, _):
    def closure():
        engine.optimizer.zero_grad()
        loss = runs.token_loss(engine, number)
        loss.backward()
        return loss

    return engine.optimizer.step(closure).item()


def clipped_by_hand(engine, number, kept):
    loss = runs.token_loss(engine, number)
    loss.backward()
    kept.append(engine.clip_grad_norm_(0.01).item())
    engine.step()
    return loss.item()


def overflowing(engine, number, kept):
    """The loss of one step is too large for float16."""
    loss = runs.token_loss(engine, number)
    engine.backward(loss * (math.inf if number == 1 else 1))
    kept.append((engine.step(), engine.loss_scale))
    return loss.item()


HALF = {"param_dtype": "float16", "loss_scale": {"start": 128.0}}
LOOPS = {
    "own gradient": (own_gradient, Shift, {}),
    "own gradient, clipped": (own_gradient, Shift, {"clip_grad_norm": 0.1}),
    "kept by a hook": (kept_by_a_hook, Shift, {}),
    "nan": (own_nan, Shift, {"nonfinite": "skip"}),
    "plain": (plainly, runs.build, {}),
    "plain, bf16": (plainly, runs.build, BF16_MAIN),
    "closure": (with_a_closure, runs.build, {}),
    "clipped by hand": (clipped_by_hand, runs.build, {}),
    "float16": (overflowing, runs.build, {"precision": HALF}),
    "kept gradients": (kept_gradients, runs.build, {}),
    "branches": (of_the_engine, Pair, {"units": ["Sequential"], "recompute": "unit"}),
    "checkpoints": (of_the_engine, Selective, {"units": ["Sequential"]}),
}


def one_by_one(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


@pytest.mark.long_where(num_ranks=[2])
@on_ranks(1, 2, timeout=200)
def test_steps_of_plain_loops_wait_whatever_becomes_of_the_memory_of_their_gradients(num_ranks):
    found = []
    for name, (loop, make, config) in LOOPS.items():
        if name == "checkpoints" and num_ranks > 1:  # torch refuses gathers in such checkpoints
            continue

        def start(make=make, config=config):
            return runs.start({"stage": 3} | config, one_by_one, model=make())

        # The forward of a closure comes after the begin of the next step; kept gradients may be looked at.
        found += differ(name, start, start, loop, 5, name not in ("closure", "kept gradients"))
    return found


@on_ranks(2)
def test_averages_checkpoints_and_an_end_find_everything_stepped(tmp_path):
    """An average, a checkpoint, states that are loaded, and an end between a step and the next forward."""
    ends = []
    for is_late in (False, True):
        with waiting(is_late) as names:
            engine = runs.start({"stage": 3}, OPTIMIZERS["AdamW"])
            average = zeroshard.EMA(engine, decay=0.5)
            losses = runs.train(engine, range(2))
            assert bool(names) is is_late
            engine.save_checkpoint(tmp_path / f"{is_late}")
            losses += runs.train(engine, range(2, 4))
            engine.load_checkpoint(tmp_path / f"{is_late}")
            losses += runs.train(engine, [4])
            with average.applied():
                shown = [value.clone() for value in engine.full_state_dict().values()]
            losses += runs.train(engine, [5])
            model = engine.module
            engine.close()
            ends.append([*shown, *(p.detach().clone() for p in model.parameters())])
    return [number for number, pair in enumerate(zip(*ends, strict=True)) if not torch.equal(*pair)]


@on_ranks(2)
def test_a_step_that_waits_is_not_taken_by_an_engine_that_goes_and_keeps_nothing_in_memory():
    """One is closed, and one dropped."""
    steps = []
    with waiting(True):
        closed, engine = (runs.start({"stage": 3}, OPTIMIZERS["AdamW"]) for _ in range(2))
        for one in (closed, engine):
            runs.train(one, range(2))
        ends = [weakref.ref(one) for one in (engine.optimizer, engine._runtime, last(engine))]
        optimizer = closed.optimizer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LateSteps, "_step", lambda _, unit: steps.append(unit.name))
            closed.close(restore=False)
            list(optimizer.state)
            optimizer.state_dict()
        del engine, one
        gc.collect()
    assert [end() for end in ends] + steps == [None] * 3


@pytest.mark.parametrize("how", ["unit", "end"])
@on_ranks(2)
def test_after_a_step_that_failed_nothing_is_saved_or_stepped_until_a_load(how, tmp_path):
    """It fails for units in a forward, or at its end before somebody looks."""
    with waiting(True):
        engine = runs.start({"stage": 3}, OPTIMIZERS["AdamW"])
        runs.train(engine, range(2))
        engine.save_checkpoint(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            if how == "end":
                patch.setattr(StepByParts, "_end_step", lambda _: 1 / 0)
            losses = runs.train(engine, [2])
            for unit, calls in engine._runtime.state.steps._left.items():
                if unit.name and how == "unit":
                    calls[:] = [lambda: 1 / 0]
            with pytest.raises(ZeroDivisionError):
                runs.token_loss(engine, 3).backward()
        message = runs.refusal(lambda: engine.save_checkpoint("never"))
        assert "an exception has ended the last step" in message
        assert "Load the last checkpoint" in message
        refused = [
            lambda: runs.token_loss(engine, 2),
            engine.full_state_dict,
            engine.unsharded().__enter__,
            lambda: next(engine.named_full_parameters()),
            engine.close,
        ]
        for call in refused:
            assert "has ended the last step in a forward" in runs.refusal(call)
        engine.load_checkpoint(tmp_path)
        assert runs.train(engine, [2]) == losses
        runs.train(engine, [3])
        engine.close(restore=False)


@on_ranks(2)
def test_values_of_a_step_that_waits_are_read_in_the_order_of_forwards(tmp_path):
    """Each parcel of two steps was read before its unit asked for it."""
    hits, fetch = [], HostPieces.fetch

    def fetched(pieces, parcel):
        hits.append(any(parcel is one for one, _ in pieces._ahead))
        return fetch(pieces, parcel)

    config = {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    engine = runs.start(config, lambda model: torch.optim.AdamW([*model.parameters()][::-1]))
    runs.train(engine, range(2))
    runs.token_loss(engine, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostPieces, "fetch", fetched)
        runs.train(engine, range(2, 4))
        runs.token_loss(engine, 4)
    engine.close(restore=False)
    assert len(hits) > 4
    assert all(hits)
