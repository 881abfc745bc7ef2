"""Randomly drawn asynchronous runs against `histories.py`: models, methods, optimizers, and habits of users.

A case draws blocks that are used twice, at times or never, frozen and tied parameters, BatchNorm, parameter
groups, schedules of the learning rate, lists of 1 to 11 micro-batches and of several batches. Between lists
it evaluates, edits weights, changes the learning rate, or saves a checkpoint that a new engine loads, perhaps
at another stage. Losses are means in float32; parameters agree within 1e-11, as gradients are added up in
another order, and Adam divides them by their own size.
"""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import zeroshard
from tests.parallel.pipeline.asynchronous import histories

WIDTH, ROWS, TOKENS = 4, 3, 7
WEIGHTS = ("latest", "stash", "vertical", "double", "estimate", "predict", "lwp", "lwp-weights", "bounded")
ALONG_UPDATE = ("predict", "lwp")

# ---------------------------------------------------------------------------------------------- blocks


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.linear(x).tanh())


class Sometimes(nn.Module):
    """A layer that the data chooses, one that is always used, and a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.chosen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = self.linear(x)
        return y + self.chosen(x) if x.detach().sum() > 0 else y


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + self.norm(self.linear(x))


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.scale = nn.Parameter(torch.rand(1, WIDTH)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return (x * self.gain).tanh() * self.scale


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)

    def forward(self, x):
        return self.embedding(x).sum(1)


def feed_forward():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH, bias=False))


BLOCKS = (feed_forward, Twice, Sometimes, Normed, Gain, nn.Tanh)

# ----------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Act:
    """Something that a user does; `number` chooses its data."""

    kind: str
    number: int
    num_microbatches: int
    num_batches: int
    factor: float
    stage: int


@dataclass(frozen=True)
class Case:
    seed: int
    num_stages: int
    num_ranks: int
    stage: int
    method: histories.Method
    max_crossed_steps: int | None
    optimizer: str
    has_groups: bool
    scheduler: str
    is_embedded: bool
    share_frozen: float
    is_tied: bool
    cuts: tuple[int, ...]
    """The first block of each pipeline rank but the first, and the number of blocks."""
    acts: tuple[Act, ...]

    @property
    def spans(self):
        return list(itertools.pairwise((0, *self.cuts)))

    @property
    def dp(self):
        return self.num_ranks // self.num_stages


def draw(seed):
    rng = random.Random(seed)
    num_stages, num_ranks = rng.choice([(2, 2), (2, 4), (3, 3), (4, 4)])
    weights = rng.choice(WEIGHTS)
    correction = rng.choice(["none", "none", "rescale", "spike"])
    per_step = num_stages + rng.randint(0, 1) if weights == "double" else rng.choice([1, 1, 2, 3])
    bound = rng.randint(1, 3) if weights == "bounded" else None
    if bound is not None:
        per_step = max(per_step, -(-(num_stages - 1) // bound))
    predictable = ["momentum", "adam", "adamw", "amsgrad"]
    every = [*predictable, "sgd", "rmsprop", "adagrad"]
    optimizer = rng.choice(predictable if weights in ALONG_UPDATE else every)
    num_blocks = rng.randint(num_stages, 2 * num_stages + 1)
    method = histories.Method(
        weights=weights,
        per_step=per_step,
        correction=correction,
        anneal_steps=rng.choice([None, 5, 20]) if correction == "rescale" else None,
        decay=rng.choice([0.135, 0.0, 0.5, 0.99]) if weights == "estimate" else 0.135,
        synchronous_steps=rng.choice([0, 0, 1, 3, 8]),
    )
    kinds = ["train"] * 4 + ["several"] * 2 + ["evaluate", "edit", "rate", "resume", "resume elsewhere"]
    acts = [
        Act(
            kind=rng.choice(kinds),
            number=10 * number,
            num_microbatches=rng.choice([1, 2, 3, 5, 8, 11]),
            num_batches=rng.randint(2, 3),
            factor=0.5 + rng.random(),
            stage=rng.randint(0, 3),
        )
        for number in range(rng.randint(2, 6))
    ]
    return Case(
        seed=seed,
        num_stages=num_stages,
        num_ranks=num_ranks,
        stage=rng.randint(0, 3),
        method=method,
        max_crossed_steps=bound,
        optimizer="momentum" if correction == "spike" else optimizer,
        has_groups=rng.random() < 0.4,
        scheduler=rng.choice(["none", "exponential", "steps", "cosine"]),
        is_embedded=rng.random() < 0.3,
        share_frozen=rng.choice([0, 0, 0.3]),
        is_tied=rng.random() < 0.2,
        cuts=(*sorted(rng.sample(range(1, num_blocks), num_stages - 1)), num_blocks),
        acts=(*acts, Act("train", 990, 7, 1, 1.0, 0)),
    )


def model_of(case):
    rng = random.Random(case.seed)
    torch.manual_seed(case.seed)
    blocks = [rng.choice(BLOCKS)() for _ in range(case.cuts[-1])]
    if case.is_embedded:
        blocks[0] = Tokens()
    for start, end in case.spans:  # each stage has parameters
        if not any(True for block in blocks[start:end] for _ in block.parameters()):
            blocks[end - 1] = nn.Linear(WIDTH, WIDTH)
        can_tie = end - start > 1 and (end > 2 or not case.is_embedded)
        if case.is_tied and can_tie and isinstance(blocks[end - 1], Twice | Sometimes):
            blocks[end - 2] = nn.Linear(WIDTH, WIDTH)
            blocks[end - 2].weight = blocks[end - 1].linear.weight
    model = nn.Sequential(*blocks).double()
    frozen = [p for p in model.parameters() if rng.random() < case.share_frozen]
    if len(frozen) < len(list(model.parameters())):
        for parameter in frozen:
            parameter.requires_grad_(False)
    return model


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02, weight_decay=0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.8, weight_decay=0.01),
    "adam": lambda groups: torch.optim.Adam(groups, lr=3e-3, weight_decay=0.02),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=3e-3, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}
SCHEDULERS = {
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "steps": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
}


def maker_of(case):
    def make(parameters):
        parameters = list(parameters)
        if not case.has_groups:
            return OPTIMIZERS[case.optimizer](parameters)
        matrices, others = ([p for p in parameters if (p.ndim > 1) == wide] for wide in (True, False))
        groups = {"params": matrices, "lr": 0.011, "weight_decay": 0.07}, {"params": others, "lr": 0.004}
        return OPTIMIZERS[case.optimizer]([group for group in groups if group["params"]])

    return make


def batch_of(case, number, num, dp, place):
    """The rows of a data-parallel rank in each micro-batch."""
    generator = torch.Generator().manual_seed(1000 * case.seed + number)
    rows = 2 * num * ROWS
    inputs, targets = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    if case.is_embedded:
        inputs = torch.randint(0, TOKENS, (rows, 2), generator=generator)
    return [torch.cat([one.chunk(dp)[place] for one in value.chunk(num)]) for value in (inputs, targets)]


# ------------------------------------------------------------------------------------------- the ranks


def build(case, stage):
    method = case.method
    pipeline = {
        "schedule": "pb",
        "num_microbatches": 4,
        "weights": method.weights,
        "microbatches_per_step": method.per_step,
        "correction": method.correction,
        "anneal_steps": method.anneal_steps,
        "synchronous_steps": method.synchronous_steps,
        "split": [str(cut) for cut in case.cuts[:-1]],
    }
    if method.weights == "estimate":
        pipeline["decay"] = method.decay
    if case.max_crossed_steps is not None:
        pipeline["max_crossed_steps"] = case.max_crossed_steps
    return zeroshard.initialize(
        model_of(case),
        maker_of(case),
        {"stage": stage, "mesh": {"pp": case.num_stages}, "pipeline": pipeline},
        lr_scheduler=SCHEDULERS.get(case.scheduler),
        loss_fn=nn.functional.mse_loss,
    ).engine


def run(case, folder):
    """The loss and the step count of each list, and the parameters of this rank at the end."""
    engine, log = build(case, case.stage), []
    for act in case.acts:
        num, place = act.num_microbatches, (engine.dp_world_size, engine.dp_rank)
        if act.kind in ("train", "evaluate"):
            engine.set_gradient_accumulation_steps(num)
            call = engine.train_batch if act.kind == "train" else engine.eval_batch
            log.append((call(*batch_of(case, act.number, num, *place)).item(), engine.global_step))
        elif act.kind == "several":
            engine.set_gradient_accumulation_steps(num)
            batches = [batch_of(case, act.number + one, num, *place) for one in range(act.num_batches)]
            losses = engine.train_batches(map(tuple, batches), act.num_batches)
            log.append((losses.mean().item(), engine.global_step))
        elif act.kind == "edit":
            with engine.unsharded(write_back=True), torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.mul_(act.factor)
        elif act.kind == "rate":
            for group in engine.optimizer.param_groups if engine.optimizer is not None else ():
                group["lr"] *= act.factor
        else:
            engine.save_checkpoint(folder, str(act.number))
            engine.close(restore=False)
            engine = build(case, act.stage if act.kind == "resume elsewhere" else case.stage)
            engine.load_checkpoint(folder, str(act.number))
    with engine.unsharded():
        parameters = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.close(restore=False)
    return log, parameters


# -------------------------------------------------------------------------------------- the one process


def stage_of(case, blocks):
    model = nn.Sequential(*blocks)
    trained = any(p.requires_grad for p in model.parameters())
    optimizer = maker_of(case)(model.parameters()) if trained else None
    schedule = SCHEDULERS.get(case.scheduler)
    scheduler = schedule(optimizer) if schedule is not None and optimizer is not None else None
    buffers = [[buffer.clone() for buffer in model.buffers()] for _ in range(case.dp)]
    return histories.Stage(model, optimizer, scheduler, buffers)


def expected(case):
    """The same of `run`, in one process."""
    model, log, taken = model_of(case), [], 0
    stages = [stage_of(case, list(model)[start:end]) for start, end in case.spans]

    def microbatches(number):
        num = act.num_microbatches
        both = [batch_of(case, number, num, case.dp, place) for place in range(case.dp)]
        return [list(zip(*(value.chunk(num) for value in own), strict=True)) for own in both]

    for act in case.acts:
        if act.kind in ("train", "several"):
            count = act.num_batches if act.kind == "several" else 1
            found = [microbatches(act.number + one) for one in range(count)]
            batches = [[one for batch in found for one in batch[place]] for place in range(case.dp)]
            loss, steps = histories.train(stages, batches, nn.functional.mse_loss, case.method, taken)
            taken += steps
            log.append((loss, taken))
        elif act.kind == "evaluate":
            log.append((histories.evaluate(stages, microbatches(act.number), nn.functional.mse_loss), taken))
        elif act.kind == "edit":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(act.factor)
        elif act.kind == "rate":
            for group in (one for s in stages if s.optimizer is not None for one in s.optimizer.param_groups):
                group["lr"] *= act.factor
        else:  # a checkpoint has the buffers of the first data-parallel rank
            for stage in stages:
                stage.buffers = [[buffer.clone() for buffer in stage.buffers[0]] for _ in range(case.dp)]
    return log, dict(model.named_parameters())


FAST, NUM_SEEDS = 5, 24


@pytest.mark.long_where(seed=[seed for seed in range(NUM_SEEDS) if seed != FAST])
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_drawn_run_trains_as_the_history_of_weights_says(ranks, tmp_path, seed):
    case = draw(seed)
    want_log, want = expected(case)
    names = set()
    for log, parameters in ranks(case.num_ranks, run, case, str(tmp_path)):
        assert [steps for _, steps in log] == [steps for _, steps in want_log], case
        assert [loss for loss, _ in log] == pytest.approx([loss for loss, _ in want_log], rel=1e-5), case
        names |= parameters.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(
                value, want[name].detach(), rtol=1e-11, atol=1e-11, msg=f"{name}, {case}"
            )
    assert names == want.keys()
