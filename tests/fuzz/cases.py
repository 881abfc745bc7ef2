"""A case of the fuzz: model, config and habits, all of it from one integer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from tests.fuzz import tiers
from tests.fuzz.blocks import Gate
from tests.fuzz.habits import Habits, draw_habits
from tests.fuzz.models import Net, compute_in, random_model, unconditional
from tests.fuzz.muon import MUON, draws_muon, make_muon
from tests.fuzz.overrides import draw_overrides
from zeroshard.optim import AdamW8bit

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda groups: AdamW(groups, lr=1e-2),
    "fused AdamW": lambda groups: AdamW(groups, lr=1e-2, fused=True),
    "Adam": lambda groups: Adam(groups, lr=1e-2, amsgrad=True, foreach=False),
    "SGD": lambda groups: SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda groups: RMSprop(groups, lr=1e-3, momentum=0.5),
    "AdamW8bit": lambda groups: AdamW8bit(groups, lr=1e-2, min_8bit_size=300),
}

Blocks = dict[str, tuple[int, ...]]
"""The arguments of a model's forward beside its inputs."""

FAILURES = ("forward", "backward")
"""Where a step may fail, on all ranks alike."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step and what surrounds it."""

    called: tuple[int, ...]
    """The blocks that a forward calls, on all ranks alike."""
    cuts: tuple[tuple[int, ...], ...]
    """For each rank, the places in `called` that have no backward there."""
    unsynced: tuple[bool, ...]
    """For each micro-batch, whether it is under no_sync."""
    num_forwards: int
    """Forwards of a micro-batch before its backward."""
    is_split: bool
    """Whether each of these has a backward of its own."""
    fails: tuple[str, int] | None
    """One of FAILURES, and in which block, before the step."""
    evaluates: bool
    edits: bool
    """Whether parameters are changed under unsharded(write_back=True) after the step."""

    @property
    def blocks(self) -> Blocks:
        """The arguments of the model's forward on this rank."""
        return {"called": self.called, "cut": self.cuts[dist.get_rank()]}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run, twice: sharded and in plain PyTorch."""

    seed: int
    num_ranks: int
    model: Net
    config: dict[str, Any]
    unit_names: tuple[str, ...] | None
    """The modules of a predicate that is the config's `units`."""
    loop: str
    """The calls that make a step: "plain" (loss.backward()), "engine", or "train_batch"."""
    optimizer: str
    """A key of OPTIMIZERS, or `MUON`."""
    is_factory: bool
    """Whether `initialize` is given a callable that makes the optimizer."""
    decay: float
    """Weight decay of matrices; other parameters are in a group of their own without."""
    sets_to_none: bool
    """Of optimizer.zero_grad() in the plain loop."""
    batch_size: int
    """Of a micro-batch."""
    wants_input_gradients: bool
    steps: tuple[Step, ...]
    habits: Habits
    tp: int = 1
    """Ranks of a tensor group; `num_ranks` counts all ranks."""
    tp_plan: dict[str, str] | None = None

    @property
    def data_rank(self) -> int:
        """The number of this rank among those with different data."""
        return dist.get_rank() // self.tp

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """That of all parameters; None: each has its own."""
        return self.config["precision"].get("param_dtype")

    @property
    def overrides(self) -> dict[str, torch.dtype]:
        """The dtypes of some modules beside that."""
        return self.config["precision"].get("overrides", {})

    @property
    def steps_early(self) -> bool:
        """True if units are stepped in the backward, so that there are no gradients afterwards."""
        return bool(self.config.get("offload", {}).get("step_in_backward"))

    def make_optimizer(self, parameters: list[nn.Parameter], num_dims: list[int]) -> Optimizer:
        """Matrices and the rest in groups of their own; `num_dims` of the original parameters."""
        if self.optimizer == MUON:
            return make_muon(self.seed, parameters, self.decay)
        pairs = list(zip(parameters, num_dims, strict=True))
        groups = [
            {"params": [p for p, dims in pairs if dims >= 2], "weight_decay": self.decay},
            {"params": [p for p, dims in pairs if dims < 2], "weight_decay": 0.0},
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return OPTIMIZERS[self.optimizer](groups)

    def make_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    def describe(self) -> str:
        """All that was drawn, as a person who has to find a bug wants to read it."""
        options = {key: value for key, value in self.config.items() if not callable(value)}
        lines = [
            f"seed {self.seed}: {self.num_ranks} rank(s), {self.loop=}, {self.optimizer=}, {self.decay=}",
            *([f"  {self.tp_plan=}"] if self.tp > 1 else []),
            f"  config {options}" + (f", units at {self.unit_names}" if self.unit_names else ""),
            f"  {self.is_factory=}, {self.sets_to_none=}, {self.batch_size=}, {self.wants_input_gradients=}",
            f"  {self.habits}",
            *(f"  step {number}: {step}" for number, step in enumerate(self.steps)),
            *(f"  {line}" for line in str(self.model).splitlines()),
        ]
        owners: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            owners.setdefault(parameter, []).append(name)
        for parameter, names in owners.items():
            frozen = "" if parameter.requires_grad else ", frozen"
            lines.append(f"  {' = '.join(names)}: {list(parameter.shape)} {parameter.dtype}{frozen}")
        return "\n".join(lines)


def num_ranks_of(seed: int) -> int:
    """Without building the case."""
    return _first(seed)[0]


def build_case(seed: int) -> Case:
    """The same case for the same seed, in any process."""
    num_ranks, random = _first(seed)
    torch.manual_seed(seed)
    config: dict[str, Any] = {"stage": random.choice((0, 1, 2, 3, 3, 3)), "watchdog_s": 20.0}
    config["recompute"] = random.choice(("none", "none", "unit"))
    model = random_model(random, recomputes=config["recompute"] == "unit")
    loop = random.choice(("plain", "plain", "engine", "engine", "train_batch"))
    num_micro_batches = random.choice((1, 1, 2, 3))
    if loop != "plain":
        config["gradient_accumulation_steps"] = num_micro_batches
    unit_names = _choose_units(random, model, config)
    _choose_sharding(random, num_ranks, config)
    config["precision"] = _precision(random, num_ranks, model) | _use_half(seed, num_ranks, model, loop)
    if dtype := config["precision"].get("param_dtype"):
        compute_in(model, dtype)
    if random.random() < 0.4:
        config["clip_grad_norm"] = random.choice((0.01, 0.3, 10.0))
    if offload := tiers.draw_offload(seed, config["stage"]):
        config["offload"] = offload
    case = Case(
        seed=seed,
        num_ranks=num_ranks,
        model=model,
        config=config,
        unit_names=unit_names,
        loop=loop,
        optimizer=random.choice(list(OPTIMIZERS)),
        is_factory=random.random() < 0.3,
        decay=random.choice((0.0, 0.1)),
        sets_to_none=random.random() < 0.8,
        batch_size=random.choice((1, 2, 3)),
        wants_input_gradients=model.kind != "tokens" and loop != "train_batch" and random.random() < 0.3,
        steps=(),
        habits=Habits(),
    )
    steps = [_step(random, model, loop, num_micro_batches) for _ in range(random.randint(2, 4))]
    steps = _change_pace(seed, loop, _cut(seed, num_ranks, steps))
    nums = [len(step.unsynced) for step in steps]
    habits = draw_habits(seed, model, loop, config, nums)
    if frozen := _choose_frozen(seed, model, config):
        config["frozen"] = frozen
    if not habits.penalty and "ignored" not in config:
        is_exact = num_ranks != 3
        if is_exact or all(p.dtype != torch.float64 for p in model.parameters()):
            main_dtype = config["precision"].get("main_dtype")
            config["precision"]["overrides"] = draw_overrides(seed, model, main_dtype, is_exact=is_exact)
    if habits.penalty:  # derivatives of gradients have another graph on each rank then
        steps = [replace(step, cuts=((),) * num_ranks, num_forwards=1) for step in steps]
    if draws_muon(seed) and "ignored" not in config:  # an ignored matrix in Muon's groups is refused
        case = replace(case, optimizer=MUON)
    return tiers.step_early(replace(case, steps=tuple(steps), habits=habits))


def restaged(config: dict[str, Any], stage: int) -> dict[str, Any]:
    """A config with another stage, without what that does not have."""
    config = config | {"stage": stage}
    if stage < 1:
        config.pop("shard_group_size", None)
    if stage < 3:
        config["reshard_after_forward"] = bool(config["reshard_after_forward"])
    if "offload" in config:
        config["offload"] = tiers.allowed(config["offload"], stage)
    return config


def _use_half(seed: int, num_ranks: int, model: Net, loop: str) -> dict[str, Any]:
    """Float16 and its loss scale, for a loop of the engine's, which alone may leave steps out."""
    random = Random(f"half {seed}")
    is_exact = num_ranks != 3 or all(p.dtype != torch.float64 for p in model.parameters())
    if loop == "plain" or not is_exact or random.random() >= 0.15:
        return {}
    minimum = random.choice((1.0, 1024.0))
    return {
        "param_dtype": torch.float16,
        "loss_scale": {
            "start": minimum * random.choice((1, 64, 2**16, 2**24)),
            "window": random.choice((1, 2, 3)),
            "minimum": minimum,
            "hysteresis": random.choice((1, 1, 2)),
        },
    }


def _choose_frozen(seed: int, model: Net, config: dict[str, Any]) -> str | list[str] | None:
    """All frozen parameters, or some of them, are whole on each rank."""
    random = Random(f"replicated {seed}")
    names = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if "ignored" in config or random.random() < 0.5:
        return random.choice(("replicate", "shard", None))
    return random.sample(names, random.randint(1, len(names))) if names else None


def _change_pace(seed: int, loop: str, steps: list[Step]) -> list[Step]:
    """Give each step another number of micro-batches."""
    random = Random(f"pace {seed}")
    if random.random() >= 0.25:
        return steps

    def unsynced() -> tuple[bool, ...]:
        return tuple(loop != "train_batch" and random.random() < 0.25 for _ in range(random.randint(1, 4)))

    return [replace(step, unsynced=unsynced()) for step in steps]


def _cut(seed: int, num_ranks: int, steps: list[Step]) -> list[Step]:
    """Let each rank leave out other gradients in each step; drawn apart, so that seeds keep their cases."""
    random = Random(f"cuts {seed}")
    part = random.choice((0.0, 0.0, 0.2, 0.5))

    def cut(step: Step) -> tuple[int, ...]:
        return tuple(place for place in range(len(step.called)) if random.random() < part)

    return [replace(step, cuts=tuple(cut(step) for _ in range(num_ranks))) for step in steps]


def _first(seed: int) -> tuple[int, Random]:
    random = Random(seed)
    return random.choice((1, 2, 2, 2, 3, 4)), random


def _choose_units(random: Random, model: Net, config: dict[str, Any]) -> tuple[str, ...] | None:
    """Set `units`, to what all ranks call alike."""
    allowed = unconditional(model)
    way = random.random()
    if way < 0.4:
        return None
    if way < 0.6:
        others = {type(m).__name__ for m in model.modules() if m not in allowed}
        names = sorted({type(m).__name__ for m in allowed} - others)
        config["units"] = random.sample(names, random.randint(0, min(2, len(names))))
        return None
    chosen = [m for m in allowed if random.random() < 0.4]
    config["units"] = lambda module: any(module is one for one in chosen)
    return tuple(name for name, module in model.named_modules() if module in chosen)


def _choose_sharding(random: Random, num_ranks: int, config: dict[str, Any]) -> None:
    config["num_prefetch"] = random.choice((None, 0, 1, 1, 2, 5))
    config["reshard_after_forward"] = random.random() < 0.75
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    group = num_ranks
    if config["stage"] >= 1 and random.random() < 0.3:
        group = config["shard_group_size"] = random.choice(divisors)
    if config["stage"] == 3:
        inner = [n for n in divisors if n > 1 and group % n == 0]
        if inner and random.random() < 0.3:
            config["reshard_after_forward"] = random.choice(inner)


def _precision(random: Random, num_ranks: int, model: Net) -> dict[str, Any]:
    # Where 1/N is not a power of two and gradients have another dtype on the wire than in the optimizer, it
    # matters whether they are rounded before or after they are multiplied by it.
    is_exact = num_ranks != 3
    precision = {}
    if random.random() < 0.25 and (is_exact or all(p.dtype != torch.float64 for p in model.parameters())):
        precision["param_dtype"] = torch.bfloat16
    if random.random() < 0.15 and is_exact:
        precision["reduce_dtype"] = torch.bfloat16
    if random.random() < 0.2 and is_exact:
        precision["main_dtype"] = torch.float64
    if random.random() < 0.15:
        precision["output_dtype"] = random.choice((torch.float32, torch.bfloat16))
    return precision


def _step(random: Random, model: Net, loop: str, num_micro_batches: int) -> Step:
    numbers = list(range(len(model.blocks)))
    called = numbers if random.random() < 0.7 else random.sample(numbers, random.randint(0, len(numbers)))
    if called and random.random() < 0.1:
        called = [*called, random.choice(called)]
    num_forwards = 2 if loop != "train_batch" and random.random() < 0.2 else 1
    fails = (random.choice(FAILURES), random.choice(called)) if called and random.random() < 0.15 else None
    if fails and any(isinstance(m, Gate) and m.cuts for m in model.modules()):
        fails = "forward", fails[1]  # a backward might not come there on all ranks
    syncs = [random.random() < 0.75 for _ in range(num_micro_batches)]
    return Step(
        called=tuple(called),
        cuts=(),
        unsynced=tuple(loop != "train_batch" and not sync for sync in syncs),
        num_forwards=num_forwards,
        is_split=random.random() < 0.5,
        fails=fails,
        evaluates=random.random() < 0.25,
        edits=random.random() < 0.15,
    )
