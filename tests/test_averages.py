"""Moving averages of sharded parameters are those of torch.optim.swa_utils, to the bit."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroshard
from tests.distributed.training import SOME_STAGES, numbers, seeded, start, take_steps, unequal
from tests.ranks import on_ranks
from zeroshard.plan import pieces
from zeroshard.stores.swapfile import SwapFile

DECAY = 0.9


class Net(nn.Module):
    """Tied, frozen and unused parameters, a buffer that trains, and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24)) for _ in range(2))
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3, 5))
        self.last = nn.Linear(24, 7)
        self.again = nn.Linear(24, 7, bias=False)
        self.again.weight = self.last.weight
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen += 1
        x = self.frozen(self.first(x))
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.last(x) + self.again(x)


build = partial(seeded, Net)


class Reference:
    """torch's own average, of the model that `full_state_dict` tells after each step; on rank 0."""

    def __init__(self, engine, model=None):
        self.engine, self.model = engine, model or build()
        self.load()
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def load(self):
        state = self.engine.full_state_dict()
        if state:
            self.model.load_state_dict(state)

    def update(self):
        self.load()
        self.averaged.update_parameters(self.model)

    def state(self):
        return self.averaged.module.state_dict() if dist.get_rank() == 0 else {}


def compare(engine, ema, reference, what):
    """Differences of the shown averages from torch's, and of the trained values from those before."""
    before = engine.full_state_dict()
    with ema.applied():
        shown = engine.full_state_dict()
    found = list(unequal(f"{what}, averages", shown, reference.state()))
    return found + list(unequal(f"{what}, trained", engine.full_state_dict(), before))


def averages_of(stages, **config):
    found = []
    for stage in stages:
        engine, _ = start(build(), stage=stage, **config)
        ema, reference = zeroshard.EMA(engine, DECAY), Reference(engine)
        found += compare(engine, ema, reference, f"stage {stage} before the first step")
        for number in range(3):
            take_steps(engine, [number])
            reference.update()
        found += compare(engine, ema, reference, f"stage {stage}")
        assert ema.num_updates == engine.global_step == 3
    return found


@on_ranks(2)
def test_averages_are_those_of_torch_to_the_bit():
    return averages_of(SOME_STAGES)


@on_ranks(2)
def test_averages_of_bfloat16_parameters_are_float32_and_are_shown_rounded():
    """bfloat16 in compute, with float32 main parameters or without."""
    found = []
    for precision in ("bf16", {"param_dtype": "bf16", "main_dtype": "bf16"}):
        engine, _ = start(build(), stage=3, precision=precision)
        ema, reference = zeroshard.EMA(engine, DECAY), Reference(engine)
        for number in range(3):
            take_steps(engine, [number])
            reference.update()
        kept = {p.fqn: values.clone() for p, values in engine._parts.averages["ema"].parameters.items()}
        assert {values.dtype for values in kept.values()} == {torch.float32}
        main = {p.fqn: p.dtype for p in engine._runtime.parameters if p.requires_grad}
        want = {
            name: values.to(main[name]).float() if name in main else values
            for name, values in reference.state().items()
        }
        with ema.applied():
            shown = engine.full_state_dict()
        for tied in ("again.weight",) if want else ():
            want[tied] = want["last.weight"]
        found += unequal(str(precision), shown, want)
    return found


@on_ranks(2)
def test_all_that_reads_parameters_sees_the_averages():
    """Forwards, single parameters, units and blocks of full parameters inside `applied()`."""
    found = []
    engine, _ = start(build(), stage=3)
    ema, twin = zeroshard.EMA(engine, DECAY), build()
    for number in range(3):
        take_steps(engine, [number])
    engine.eval()
    inputs = numbers(9, 4, 7)
    before = engine(inputs)
    with ema.applied(), torch.no_grad():
        states = [engine.full_state_dict()]
        dist.broadcast_object_list(states)
        twin.load_state_dict(states[0])
        for own, values in zip(twin.buffers(), engine.buffers(), strict=True):
            own.copy_(values)  # each rank has its own
        found += unequal("stage 3", {"out": engine(inputs)}, {"out": twin.eval()(inputs)})
        assert torch.equal(engine.full_parameter("first.weight"), twin.first.weight)
        with engine.unsharded():
            assert torch.equal(engine.module.first.weight, twin.first.weight)
        leaf = inputs.clone()
        with torch.enable_grad():
            leaf.requires_grad_()
            (gradient,) = torch.autograd.grad(engine(leaf).sum(), leaf)
        assert gradient.abs().sum() > 0
    found += unequal("after", {"out": engine(inputs)}, {"out": before})
    engine.train()
    take_steps(engine, [4])  # goes on
    assert ema.num_updates == 4
    return found


def calls_inside(engine, optimizer, other):
    """Calls that are refused, by their names in errors."""
    whole = torch.ones(24, 7)
    return {
        "a backward": lambda: engine(numbers(0, 6, 7)).sum().backward(),
        "backward()": lambda: engine.backward(engine(numbers(0, 6, 7)).sum()),
        "step()": engine.step,
        "an optimizer step": optimizer.step,
        "train_batch()": lambda: engine.train_batch(numbers(0, 6, 7)),
        "save_checkpoint()": lambda: engine.save_checkpoint("nowhere"),
        "load_checkpoint()": lambda: engine.load_checkpoint("nowhere"),
        "set_full_parameter()": lambda: engine.set_full_parameter("first.weight", whole),
        "unsharded(write_back=True)": lambda: engine.load_state_dict({}, strict=False),
        "close()": engine.close,
        "EMA.applied()": lambda: other.applied().__enter__(),
        "EMA()": lambda: zeroshard.EMA(engine, DECAY, name="third"),
    }


@on_ranks(2)
def test_training_and_edits_inside_are_refused_and_change_nothing():
    found = []
    engine, optimizer = start(build(), stage=3)
    ema, other = zeroshard.EMA(engine, DECAY), zeroshard.EMA(engine, 0.5, name="fast")
    for number in range(2):
        take_steps(engine, [number])
    before, buffers = engine.full_state_dict(), [b.clone() for b in engine.buffers()]
    calls = calls_inside(engine, optimizer, other)
    for what, call in calls.items():
        try:
            with ema.applied():
                call()
        except RuntimeError as error:
            if not str(error).startswith(f"{what} inside EMA.applied()"):
                found.append(f"{what}: {error}")
        else:
            found.append(f"{what}: not refused")
    found += unequal("stage 3", engine.full_state_dict(), before)
    found += [i for i, (a, b) in enumerate(zip(engine.buffers(), buffers, strict=True)) if (a != b).any()]
    take_steps(engine, [2])
    assert ema.num_updates == other.num_updates == 3
    return found


@on_ranks(2)
def test_trained_values_are_back_after_an_exception():
    """Exceptions of the user, in the block and in the middle of a forward."""

    def fail(*_):
        raise KeyError("in the middle")

    found = []
    model = build()
    engine, _ = start(model, stage=3)
    ema, plain = zeroshard.EMA(engine, DECAY), copy.deepcopy(engine.config)
    take_steps(engine, (0, 1))
    before = engine.full_state_dict()
    with pytest.raises(LookupError), ema.applied():
        raise LookupError
    found += unequal("stage 3", engine.full_state_dict(), before)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        handle = model.blocks[1].register_forward_hook(fail)
        with pytest.raises(KeyError), mode(), ema.applied():
            engine.module(numbers(0, 6, 7))
        handle.remove()
        found += unequal(str(mode), engine.full_state_dict(), before)
    assert engine.config == plain
    take_steps(engine, [2])
    assert ema.num_updates == 3
    return found


@on_ranks(2)
def test_the_steps_that_the_engine_counts_update_an_average():
    """Updates with accumulation, with steps of the user, and without those that are left out."""
    engine, optimizer = start(build(), stage=3, gradient_accumulation_steps=2, nonfinite="skip")
    ema, counts = zeroshard.EMA(engine, DECAY), []
    for number in range(4):
        take_steps(engine, [number])
        counts.append(ema.num_updates)
    for _ in range(2):
        engine.backward(engine(numbers(4, 6, 7)).square().mean() * float("inf"))
        engine.step()
    counts.append(ema.num_updates)
    engine, optimizer = start(build(), stage=3)
    ema = zeroshard.EMA(engine, DECAY)
    engine(numbers(0, 6, 7)).square().mean().backward()
    optimizer.step()
    assert [*counts, ema.num_updates] == [0, 1, 1, 2, 2, 1]


@on_ranks(2)
def test_wrong_arguments_are_refused_on_all_ranks():
    engine, _ = start(build(), stage=3)
    zeroshard.EMA(engine, DECAY)
    for args, name, text in (
        ((engine, 1.5), "a", "from 0 to 1"),
        ((engine, True), "a", "from 0 to 1"),
        ((engine, DECAY), "a b", "expected a name"),
        ((engine, DECAY), "ema", "another name"),
        ((engine.module, DECAY), "a", "got Net"),
        ((engine, 0.5 + dist.get_rank() / 10), "a", "the same on every"),
    ):
        with pytest.raises(ValueError, match=text):
            zeroshard.EMA(*args, name=name)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        zeroshard.EMA(engine, DECAY, name="late")


@on_ranks(2)
def test_averages_in_files_are_those_of_torch_to_the_bit(tmp_path):
    """Averages in files, in ranges of a block; then a checkpoint of them."""
    offload = {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "NEAR_BYTES", 1024)
        found = averages_of((3,), offload=offload)
        engine, _ = start(build(), stage=3, offload=offload)
        ema = zeroshard.EMA(engine, DECAY)
    for number in range(2):
        take_steps(engine, [number])
    engine.save_checkpoint(tmp_path / "saved")
    with ema.applied():
        shown = engine.full_state_dict()
    twin, _ = start(build(), stage=1)
    again = zeroshard.EMA(twin, DECAY)
    for own, average in ((twin, again), (engine, ema)):
        own.load_checkpoint(tmp_path / "saved")
        with average.applied():
            found += unequal("loaded", own.full_state_dict(), shown)
    return found


@on_ranks(1)
def test_averages_that_could_not_be_written_are_refused_until_they_begin_anew(tmp_path):
    """A disk fails while averages are written."""
    offload = {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    engine, _ = start(build(), stage=3, offload=offload)
    engine.save_checkpoint(tmp_path / "saved")
    ema = zeroshard.EMA(engine, DECAY)
    take_steps(engine, [0])
    engine.full_state_dict()  # ends the step

    def fail(file, values, offset):
        raise RuntimeError(f"Expected to write '{file.folder}': the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwapFile, "write", fail)
        engine._parts.averages["ema"].update()
        with pytest.raises(RuntimeError, match="the disk is gone") as caught, ema.applied():
            pass
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(RuntimeError, match="the disk is gone"), ema.applied():
        pass
    with pytest.warns(UserWarning, match="begin anew"):
        engine.load_checkpoint(tmp_path / "saved")
    with ema.applied():
        shown = engine.full_state_dict()
    return list(unequal("begun anew", shown, engine.full_state_dict()))
