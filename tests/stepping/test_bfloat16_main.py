"""Main parameters in bfloat16 against plain PyTorch: a step in float32, rounded by hand."""

import copy
import json
import warnings
import zlib
from functools import partial
from itertools import product

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.checkpoint.runs import without_numba
from tests.distributed.models import Told
from tests.distributed.training import STAGES, caught, own_loss, seeded, take_steps
from tests.ranks import on_ranks
from zeroshard.checkpoint.files import MANIFEST
from zeroshard.optim import LAMB, AdamW8bit
from zeroshard.stepping.rounding import Rounding, random_bits

SEED, NUM_STEPS = 1234, 3
BF16_MAIN = {"main_dtype": "bf16", "param_dtype": "bf16"}


# ------------------------------------------------------------------------------------------- the reference


def round_by_hand(values, seed, step, name):
    """float32 that are bfloat16, by stochastic rounding, whose random bits test_rounding.py looks at."""
    words = values.detach().reshape(-1).view(torch.int32).long()
    words = words + random_bits(Rounding(seed, step).key(name), 0, len(words)) & ~0xFFFF
    return (words << 32 >> 32).int().view(torch.float32).view(values.shape)


@without_numba
def by_hand(kind, model, steps=range(NUM_STEPS), grads=None, skipped=()):
    """The parameters after plain steps in float32 with their values rounded after each."""
    grads = grads or gradient
    main = {name: p.detach().bfloat16().float() for name, p in model.named_parameters()}
    wide = {name: nn.Parameter(value.clone()) for name, value in main.items()}
    optimizer = KINDS[kind](list(wide.values()))
    count = 0
    for step in steps:
        if step in skipped:
            continue
        for name, p in wide.items():
            p.grad = grads(name, step, p.shape)
        optimizer.step()
        with torch.no_grad():
            for name, p in wide.items():
                if p.grad is not None:
                    p.copy_(round_by_hand(p, SEED, count, name))
        count += 1
    return {name: p.detach() for name, p in wide.items()}


# ---------------------------------------------------------------------------------------------- the model

KINDS = {
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.1, fused=True),
    "for-each AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.1, foreach=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-3, initial_accumulator_value=0.1),
    "AdamW8bit": lambda ps: AdamW8bit(ps, lr=1e-3),
    "LAMB": lambda ps: LAMB(ps, lr=1e-2),
    "bitsandbytes": lambda ps: bitsandbytes.optim.AdamW32bit(ps, lr=1e-3),
}


def gradient(name, step, shape):
    """Numbers of 7 bits, so that bfloat16 holds them; None where a step does not use the parameter."""
    if name == "rest.gain" and step == 1:
        return None
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randint(-100, 101, shape, generator=generator) / 64


class Net(nn.Module):
    """Units with a matrix that AdamW8bit quantizes and a vector, and a parameter that one step leaves out."""

    def __init__(self):
        super().__init__()
        self.rest, self.blocks = Told("rest.", gain=(300,)), nn.ModuleList()
        self.blocks.extend(Told(f"blocks.{n}.", weight=(70, 71), bias=(37,)) for n in range(2))

    def forward(self, step, grads=None):
        grads = grads or gradient
        return sum(part(step, grads) for part in (self.rest, *self.blocks))


build = partial(seeded, Net)


def bf16_engine(kind, stage=3, *, seed=SEED, model=None, given=None, **config):
    """The engine; the seed that counts is rank 0's."""
    model = model or build()
    optimizer = KINDS[kind](model.parameters())
    torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))
    config = {"precision": BF16_MAIN, "units": ["Told"]} | config
    return zeroshard.initialize(model, optimizer, {"stage": stage, **config}, **(given or {})).engine


def of_unknown(model, optimizer, **config):
    """The engine for an optimizer of a class that gets a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return zeroshard.initialize(model, optimizer, {"precision": BF16_MAIN, **config}).engine


@without_numba
def take_own_steps(engine, steps=range(NUM_STEPS)):
    take_steps(engine, steps, own_loss)


def unequal(engine, want):
    """Names of parameters that differ by a bit; on rank 0."""
    return [name for name, value in engine.full_state_dict().items() if not torch.equal(value, want[name])]


# ----------------------------------------------------------------------------------------------- training


EVERYWHERE = [
    *({"stage": stage} for stage in (0, 1, 2)),
    *({"stage": stage, "precision": {"main_dtype": "bf16"}} for stage in (1, 3)),
    {"stage": 3, "shard_group_size": 2},
]
CASES = [(kind, {"stage": 3}) for kind in KINDS]
FAST = [("for-each AdamW", {}), ("SGD", {}), ("LAMB", {})]


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (2, FAST),
        pytest.param(2, [case for case in CASES if case[0] not in dict(FAST)], marks=pytest.mark.long),
        pytest.param(4, [*product(("fused AdamW", "AdamW8bit"), EVERYWHERE)], marks=pytest.mark.long),
    ],
    ids=["2", "2-others", "4"],
)
@on_ranks()
def test_every_optimizer_at_every_stage_has_the_bits_of_float32_steps_rounded_by_hand(cases):
    for kind, config in cases:
        engine = bf16_engine(kind, **config)
        take_own_steps(engine)
        assert not unequal(engine, by_hand(kind, build())), (kind, config)
        values = [value for state in engine.optimizer.state.values() for value in state.values()]
        assert {v.dtype for v in values if isinstance(v, torch.Tensor)} <= {torch.float32, torch.uint8}
        assert all(p.dtype is torch.bfloat16 for p in engine.parameters())


@on_ranks(2)
def test_a_plain_loop_with_closures_does_the_same_and_hooks_run_once():
    engine, calls = bf16_engine("fused AdamW"), []
    engine.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    engine.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for step in range(NUM_STEPS):

        def closure(step=step):
            calls.append("closure")
            loss = engine(step)
            loss.backward()
            return loss

        assert isinstance(engine.optimizer.step(closure), torch.Tensor)
        engine.optimizer.zero_grad()
    assert calls == ["pre", "closure", "post"] * NUM_STEPS
    assert engine.global_step == NUM_STEPS
    return unequal(engine, by_hand("fused AdamW", build()))


class Counted(torch.optim.SGD):
    """An optimizer that zeroshard does not know, and that counts its steps by group."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["held"] = {p.dtype for p in group["params"]}
        return super().step(closure)


@on_ranks(2)
def test_an_optimizer_that_nobody_knows_is_stepped_once_with_all_its_parameters_in_float32():
    model = build()
    torch.optim.SGD(model.parameters(), lr=1.0)  # from here on torch runs hooks in SGD.step as well
    groups = [{"params": [*part.parameters()]} for part in (model.rest, model.blocks)]
    optimizer = Counted(groups, lr=1e-3, momentum=0.9)
    torch.manual_seed(SEED)
    engine = of_unknown(model, optimizer, stage=1)
    take_own_steps(engine)
    assert unequal(engine, by_hand("SGD", build())) == []
    counts = [group["count"] for group in optimizer.param_groups]
    assert (counts, optimizer.param_groups[1]["held"], engine.global_step) == ([3, 3], {torch.float32}, 3)


class Failing(torch.optim.SGD):
    """Fails after it has changed the parameters."""

    def step(self, closure=None):
        super().step(closure)
        raise OSError("in the middle")


@on_ranks(2)
def test_a_step_that_fails_leaves_parameters_gradients_and_groups_as_they_were():
    model = build()
    engine = of_unknown(model, Failing(model.parameters(), lr=1.0))
    engine(0).backward()
    groups = [list(group["params"]) for group in engine.optimizer.param_groups]
    before = [(p, p.detach().clone(), p.grad.clone()) for p in engine.parameters()]
    with pytest.raises(OSError, match="in the middle"):
        engine.optimizer.step()
    for group, params in zip(engine.optimizer.param_groups, groups, strict=True):
        assert [*map(id, group["params"])] == [*map(id, params)]
    for p, values, gradient in before:
        assert p.dtype is p.grad.dtype is torch.bfloat16
        assert torch.equal(p, values)
        assert torch.equal(p.grad, gradient)


# ------------------------------------------------------- small updates, accumulation, clipping, skipped steps


def uneven(name, step, shape):
    """Micro-gradients of 1 + 4 * 2^-8 in the sum of five: bfloat16 would lose the small ones one by one."""
    return torch.full(shape, 5.0 if step % 5 == 0 else 5 * 2**-8)


def mean_of_five(name, step, shape):
    return torch.full(shape, 1 + 4 * 2**-8)


@on_ranks(2)
def test_micro_batches_add_up_in_float32_and_are_rounded_once():
    found, want = [], by_hand("SGD", build(), (0, 5), mean_of_five)
    for stage in STAGES:
        engine = bf16_engine("SGD", stage, gradient_accumulation_steps=5)
        for step in range(10):
            engine.backward(engine(step if step != 1 else 6, uneven))
            if step % 5 < 4:
                held = engine.memory_report().gradients
                found += [] if held >= 4 * sum(p.numel() for p in engine.parameters()) else [(stage, held)]
            engine.step()
        found += [(stage, name) for name in unequal(engine, want)]
        engine = bf16_engine("SGD", stage)
        with engine.no_sync():
            for step in (5, 6, 7, 8):
                (engine(step, uneven) / 5).backward()
        (engine(9, uneven) / 5).backward()
        if any((p.grad != 1 + 4 * 2**-8).any() for p in engine.parameters()):
            found.append((stage, "no_sync"))
    return found


def clipped_gradient(name, step, shape):
    """The gradient times the factor, in float32, rounded to nearest."""
    own = gradient(name, step, shape)
    every = [gradient(n, step, p.shape) for n, p in build().named_parameters()]
    whole = torch.cat([one.flatten() for one in every if one is not None])
    factor = 3.0 / (whole.double().norm().float() + 1e-6)
    return None if own is None else (own * factor).bfloat16().float()


@on_ranks(2)
def test_gradients_are_clipped_by_a_factor_of_float32():
    want = by_hand("SGD", build(), grads=clipped_gradient)
    found = []
    for stage in (0, 3):
        engine = bf16_engine("SGD", stage, clip_grad_norm=3.0)
        take_own_steps(engine)
        found += unequal(engine, want)
    return found


# ------------------------------------------------------------------------------------- checkpoints, memory


@on_ranks(1)
def test_a_checkpoint_with_a_damaged_seed_is_refused_and_one_without_leaves_the_present_one(tmp_path):
    engine = bf16_engine("SGD")
    take_own_steps(engine)
    engine.save_checkpoint(tmp_path)
    file = next(tmp_path.glob("step-3.*")) / MANIFEST
    content = json.loads(file.read_bytes())["content"]
    damaged = ({"seed": "6", "step": 3}, {"seed": 6}, {"seed": 6, "step": 3, "x": 1})
    for rounding, seed in ((None, 5), ({"seed": 6, "step": 3}, 6), *((bad, None) for bad in damaged)):
        content["rounding"] = rounding
        crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        file.write_text(json.dumps({"crc32": crc, "content": content}))
        other = bf16_engine("SGD", seed=5)
        said = caught(other.load_checkpoint, tmp_path)
        assert seed == other._guard.rounding.seed if seed else f"{MANIFEST}: expected content in" in said


@on_ranks(2)
def test_a_skipped_step_changes_nothing_and_is_not_counted():
    engine = bf16_engine("SGD", nonfinite="skip")
    for step in range(NUM_STEPS):
        bad = step == 2 and dist.get_rank() == 1
        engine.backward(engine(step) * (float("inf") if bad else 1.0))
        engine.step()
    want = by_hand("SGD", build(), skipped=(2,))
    assert (unequal(engine, want), engine.skipped_steps, engine.global_step) == ([], 1, NUM_STEPS - 1)


@on_ranks(2)
def test_checkpoints_go_from_float32_to_bfloat16_and_back(tmp_path):
    """From float32 to bfloat16, to nearest, and back; states stay what they are."""
    wide, narrow = bf16_engine("fused AdamW", precision={}), bf16_engine("fused AdamW", 2, seed=99)
    take_own_steps(wide, range(2))
    wide.save_checkpoint(tmp_path / "wide")
    narrow.load_checkpoint(tmp_path / "wide")
    wanted = wide.full_state_dict()
    assert not unequal(narrow, {name: value.bfloat16().float() for name, value in wanted.items()})
    narrow.save_checkpoint(tmp_path / "narrow")
    again = bf16_engine("fused AdamW", 3, precision={}, seed=99)
    again.load_checkpoint(tmp_path / "narrow")
    assert not unequal(again, narrow.full_state_dict())
    for name in dict(build().named_parameters()):
        states = [engine.full_optimizer_state(name)["exp_avg"] for engine in (wide, again)]
        assert torch.equal(*states)
    for engine in (narrow, again):
        take_own_steps(engine, range(2, 4))
        assert {state["exp_avg"].dtype for state in engine.optimizer.state.values()} == {torch.float32}


@on_ranks(2)
def test_load_state_dict_of_the_optimizer_keeps_states_in_float32():
    """torch's own way of saving a rank's states."""
    engine = bf16_engine("fused AdamW")
    take_own_steps(engine, range(2))
    saved = copy.deepcopy(engine.optimizer.state_dict())
    before = [p.detach().clone() for p in engine.parameters()]
    engine.optimizer.load_state_dict(saved)
    got = engine.optimizer.state_dict()["state"]
    for number, state in saved["state"].items():
        for key, value in state.items():
            assert value.dtype is got[number][key].dtype
            assert torch.equal(value, got[number][key])
    assert all(torch.equal(p, q) for p, q in zip(engine.parameters(), before, strict=True))
