"""Main parameters in bfloat16 against plain PyTorch: a step in float32, rounded with integers of Python."""

import copy
import hashlib
import json
import warnings
import zlib
from typing import ClassVar

import bitsandbytes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.checkpoint.runs import without_numba
from tests.distributed.training import STAGES
from tests.ranks import on_ranks
from zeroshard.checkpoint.files import MANIFEST
from zeroshard.optim import LAMB, AdamW8bit

SEED, NUM_STEPS = 1234, 3
BF16_MAIN = {"main_dtype": "bf16", "param_dtype": "bf16"}


# ------------------------------------------------------------------------------------------- the reference


def random_bits(seed, step, name, num):
    """16 for each element, from SplitMix64 in numpy's 64-bit integers, which wrap."""
    digest = hashlib.blake2b(f"{seed}:{step}:{name}".encode(), digest_size=8).digest()
    count = np.arange(1, -(-num // 4) + 1, dtype=np.uint64)
    z = np.uint64(int.from_bytes(digest, "little")) + count * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    shifts = np.array([0, 16, 32, 48], dtype=np.uint64)
    return (z[:, None] >> shifts & np.uint64(0xFFFF)).reshape(-1)[:num].astype(np.uint32)


def round_by_hand(values, seed, step, name):
    """float32 that are bfloat16: those that stochastic rounding gives."""
    words = values.detach().numpy().reshape(-1).view(np.uint32)
    words = words + random_bits(seed, step, name, words.size) & np.uint32(0xFFFF0000)
    return torch.from_numpy(words.view(np.float32)).view(values.shape)


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
            p.grad = grads(name, step, p.shape) if is_used(name, step) else None
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
    """Numbers of 7 bits, so that bfloat16 holds them."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randint(-100, 101, shape, generator=generator) / 64


def is_used(name, step):
    return name != "gain" or step != 1


class Block(nn.Module):
    """A unit with a matrix that AdamW8bit quantizes, and a vector."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.weight, self.bias = nn.Parameter(torch.randn(70, 71)), nn.Parameter(torch.randn(37))

    def forward(self, step, grads):
        return sum(
            (p * grads(f"{self.name}.{name}", step, p.shape).to(p.dtype)).sum()
            for name, p in (("weight", self.weight), ("bias", self.bias))
        )


class Net(nn.Module):
    """Linear in its parameters, so that gradients are what they are told to be."""

    def __init__(self):
        super().__init__()
        self.gain, self.blocks = nn.Parameter(torch.randn(300)), nn.ModuleList()
        self.blocks.extend(Block(f"blocks.{number}") for number in range(2))

    def forward(self, step, grads=gradient):
        total = sum(block(step, grads) for block in self.blocks)
        if is_used("gain", step):
            total = total + (self.gain * grads("gain", step, (300,)).to(self.gain.dtype)).sum()
        return total


def build():
    torch.manual_seed(0)
    return Net()


def start(kind, stage=3, *, seed=SEED, model=None, given=None, **config):
    """The engine; the seed that counts is rank 0's."""
    model = model or build()
    optimizer = KINDS[kind](model.parameters())
    torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))
    config = {"precision": BF16_MAIN, "units": ["Block"]} | config
    return zeroshard.initialize(model, optimizer, {"stage": stage, **config}, **(given or {})).engine


def of_unknown(model, optimizer, **config):
    """The engine for an optimizer of a class that gets a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return zeroshard.initialize(model, optimizer, {"precision": BF16_MAIN, **config}).engine


@without_numba
def train(engine, steps=range(NUM_STEPS)):
    for step in steps:
        engine.backward(engine(step))
        engine.step()


def unequal(engine, want):
    """Names of parameters that differ by a bit; on rank 0."""
    return [name for name, value in engine.full_state_dict().items() if not torch.equal(value, want[name])]


# ----------------------------------------------------------------------------------------------- training


def all_stages(kinds, configs):
    found = []
    for kind in kinds:
        want = by_hand(kind, build())
        for config in configs:
            engine = start(kind, **config)
            train(engine)
            found += [(kind, config, name) for name in unequal(engine, want)]
            values = [value for state in engine.optimizer.state.values() for value in state.values()]
            dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
            if not dtypes <= {torch.float32, torch.uint8}:
                found.append((kind, config, dtypes))
            if any(p.dtype is not torch.bfloat16 for p in engine.parameters()):
                found.append((kind, config, "dtype of parameters"))
    return found


FAST = ["for-each AdamW", "SGD", "LAMB"]
EVERYWHERE = [
    *({"stage": stage} for stage in (0, 1, 2)),
    *({"stage": stage, "precision": {"main_dtype": "bf16"}} for stage in (1, 3)),
    {"stage": 3, "shard_group_size": 2},
]


@pytest.mark.parametrize(
    ("num_ranks", "kinds", "configs"),
    [
        (2, FAST, [{"stage": 3}]),
        pytest.param(2, [kind for kind in KINDS if kind not in FAST], [{"stage": 3}], marks=pytest.mark.long),
        pytest.param(4, ["fused AdamW", "AdamW8bit"], EVERYWHERE, marks=pytest.mark.long),
    ],
)
@on_ranks()
def test_every_optimizer_at_every_stage_has_the_bits_of_float32_steps_rounded_by_hand(kinds, configs):
    return all_stages(kinds, configs)


@on_ranks(2)
def test_a_plain_loop_with_closures_does_the_same_and_hooks_run_once():
    want, found = by_hand("fused AdamW", build()), []
    engine = start("fused AdamW")
    calls = []
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
    found += unequal(engine, want)
    assert calls == ["pre", "closure", "post"] * NUM_STEPS
    assert engine.global_step == NUM_STEPS
    return found


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
    blocks = [p for name, p in model.named_parameters() if name != "gain"]
    optimizer = Counted([{"params": [model.gain]}, {"params": blocks}], lr=1e-3, momentum=0.9)
    torch.manual_seed(SEED)
    engine = of_unknown(model, optimizer, stage=1)
    train(engine)
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
    optimizer = engine.optimizer
    before = [p.detach().clone() for p in engine.parameters()]
    groups = [list(group["params"]) for group in optimizer.param_groups]
    engine(0).backward()
    grads = [p.grad.clone() for p in engine.parameters()]
    try:
        optimizer.step()
        failed = False
    except OSError:
        failed = True
    after = list(engine.parameters())
    assert failed
    assert [[*map(id, g["params"])] for g in optimizer.param_groups] == [[*map(id, g)] for g in groups]
    is_same = [
        torch.equal(p, q) and p.dtype is p.grad.dtype is torch.bfloat16 and torch.equal(p.grad, grad)
        for p, q, grad in zip(after, before, grads, strict=True)
    ]
    assert all(is_same)


# ------------------------------------------------------- small updates, accumulation, clipping, skipped steps


def uneven(name, step, shape):
    """Micro-gradients of 1 + 4 * 2^-8 in the sum of five: bfloat16 would lose the small ones one by one."""
    return torch.full(shape, 5.0 if step % 5 == 0 else 5 * 2**-8)


def mean_of_five(name, step, shape):
    return torch.full(shape, 1 + 4 * 2**-8)


def want_accumulated():
    return by_hand("SGD", build(), (0, 5), mean_of_five)


@on_ranks(2)
def test_micro_batches_add_up_in_float32_and_are_rounded_once():
    found = []
    for stage in STAGES:
        engine = start("SGD", stage, gradient_accumulation_steps=5)
        for step in range(10):
            engine.backward(engine(step if step != 1 else 6, uneven))
            if step % 5 < 4:
                held = engine.memory_report().gradients
                found += [] if held >= 4 * sum(p.numel() for p in engine.parameters()) else [(stage, held)]
            engine.step()
        found += [(stage, name) for name in unequal(engine, want_accumulated())]
        engine = start("SGD", stage)
        with engine.no_sync():
            for step in (5, 6, 7, 8):
                (engine(step, uneven) / 5).backward()
        (engine(9, uneven) / 5).backward()
        if any((p.grad != 1 + 4 * 2**-8).any() for p in engine.parameters()):
            found.append((stage, "no_sync"))
    return found


MAX_NORM = 3.0


def clipped_gradient(name, step, shape):
    """The gradient times the factor, in float32, rounded to nearest."""
    shapes = {n: p.shape for n, p in build().named_parameters() if is_used(n, step)}
    whole = torch.cat([gradient(n, step, s).flatten() for n, s in shapes.items()])
    factor = MAX_NORM / (whole.double().norm().float() + 1e-6)
    return (gradient(name, step, shape) * factor).bfloat16().float()


@on_ranks(2)
def test_gradients_are_clipped_by_a_factor_of_float32():
    want = by_hand("SGD", build(), grads=clipped_gradient)
    found = []
    for stage in (0, 3):
        engine = start("SGD", stage, clip_grad_norm=MAX_NORM)
        train(engine)
        found += unequal(engine, want)
    return found


# ------------------------------------------------------------------------------------- checkpoints, memory


def load_rounding(folder, rounding):
    """The error for a manifest that holds another rounding or none, or the seed that goes on."""
    engine = start("SGD")
    train(engine)
    engine.save_checkpoint(folder)
    file = next(folder.glob("step-3.*")) / MANIFEST
    content = json.loads(file.read_bytes())["content"]
    content["rounding"] = rounding
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    file.write_text(json.dumps({"crc32": crc, "content": content}))
    other = start("SGD", seed=5)
    try:
        other.load_checkpoint(folder)
    except RuntimeError as error:
        return str(error)
    return other._guard.rounding.seed


def test_a_checkpoint_with_a_damaged_seed_is_refused_and_one_without_leaves_the_present_one(ranks, tmp_path):
    assert ranks(1, load_rounding, tmp_path / "none", None) == [5]
    assert ranks(1, load_rounding, tmp_path / "other", {"seed": 6, "step": 3}) == [6]
    for number, bad in enumerate(({"seed": "6", "step": 3}, {"seed": 6}, {"seed": 6, "step": 3, "x": 1})):
        message = ranks(1, load_rounding, tmp_path / str(number), bad)[0]
        assert f"{MANIFEST}: damaged (" in message


@on_ranks(2)
def test_checkpoints_go_from_float32_to_bfloat16_and_back(tmp_path):
    """From float32 to bfloat16, to nearest, and back; states stay what they are."""
    found = []
    wide = start("fused AdamW", precision={})
    train(wide, range(2))
    wide.save_checkpoint(tmp_path / "wide")
    narrow = start("fused AdamW", 2, seed=99)
    narrow.load_checkpoint(tmp_path / "wide")
    wanted = wide.full_state_dict()
    found += unequal(narrow, {name: value.bfloat16().float() for name, value in wanted.items()})
    narrow.save_checkpoint(tmp_path / "narrow")
    again = start("fused AdamW", 3, precision={}, seed=99)
    again.load_checkpoint(tmp_path / "narrow")
    found += unequal(again, narrow.full_state_dict())
    states = [
        {p.fqn: engine.optimizer.state[p]["exp_avg"] for p in engine.parameters()} for engine in (wide, again)
    ]
    found += [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    found += [value.dtype for value in states[1].values() if value.dtype is not torch.float32]
    for engine in (narrow, again):
        train(engine, range(2, 4))
    found += [s["exp_avg"].dtype for s in narrow.optimizer.state.values() if s["exp_avg"].element_size() != 4]
    return found


@on_ranks(2)
def test_zero_grad_drops_sums_and_a_plain_step_takes_them():
    """Sums that zero_grad() drops, and sums that a plain step takes before the boundary."""
    found = []
    for stage in (1, 3):
        engine = start("SGD", stage, gradient_accumulation_steps=3)
        engine.backward(engine(0))
        engine.step()
        engine.zero_grad()
        found += [stage] if engine.memory_report().gradients else []
        engine.backward(3 * engine(0))
        engine.optimizer.step()
        found += [(stage, name) for name in unequal(engine, by_hand("SGD", build(), [0]))]
    return found


@on_ranks(2)
def test_a_skipped_step_changes_nothing_and_is_not_counted():
    engine = start("SGD", nonfinite="skip")
    for step in range(NUM_STEPS):
        bad = step == 2 and dist.get_rank() == 1
        engine.backward(engine(step) * (float("inf") if bad else 1.0))
        engine.step()
    want = by_hand("SGD", build(), skipped=(2,))
    assert (unequal(engine, want), engine.skipped_steps, engine.global_step) == ([], 1, NUM_STEPS - 1)


class Seeing(AdamW8bit):
    """Tells the dtypes of the parameters that its steps change."""

    seen: ClassVar = set()

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.seen.update(p.dtype for p in parameters if p.grad is not None)
        return super().step(closure)


@pytest.mark.parametrize(
    ("module", "dtype"), [("zeroshard.seeing", torch.bfloat16), ("somewhere", torch.float32)]
)
@on_ranks(2)
def test_an_8bit_optimizer_steps_bfloat16_as_it_is_unless_nobody_knows_its_class(module, dtype):
    """By a class that stands in a module."""
    model, kind = build(), type("Seeing", (Seeing,), {"__module__": module})
    torch.manual_seed(SEED)
    engine = of_unknown(model, kind(model.parameters(), lr=1e-3), stage=2)
    Seeing.seen.clear()
    train(engine)
    assert (unequal(engine, by_hand("AdamW8bit", build())), Seeing.seen) == ([], {dtype})


@on_ranks(2)
def test_load_state_dict_of_the_optimizer_keeps_states_in_float32():
    """torch's own way of saving a rank's states."""
    engine = start("fused AdamW")
    train(engine, range(2))
    saved = copy.deepcopy(engine.optimizer.state_dict())
    before = [p.detach().clone() for p in engine.parameters()]
    engine.optimizer.load_state_dict(saved)
    got = engine.optimizer.state_dict()["state"]
    assert all(
        torch.equal(value, got[number][key]) and value.dtype is got[number][key].dtype
        for number, state in saved["state"].items()
        for key, value in state.items()
    )
    assert all(torch.equal(p, q) for p, q in zip(engine.parameters(), before, strict=True))
