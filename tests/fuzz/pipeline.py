"""Models over two pipeline ranks: Sequentials and language models with tied weights, hooks and other habits.

A case trains three steps and is compared with one process in losses, gradient norms, evaluations and the
parameters of each rank, by all of their names. It is in float64, as micro-batches and chunks add up in
another order.
"""

from __future__ import annotations

import tempfile
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import zeroshard
from tests.fuzz import tiers
from tests.fuzz.run import Trace, differences
from zeroshard.optim import LAMB, LARS, LAMB8bit, Muon

NUM_STEPS, WIDTH, VOCABULARY, LENGTH = 3, 8, 24, 5

APART = {"LAMB8bit": 1e-3, "Muon": 1e-3}
"""The part of its norm by which a value may be off, by optimizer: a state between two codes is rounded to
either of them, and Muon multiplies in bfloat16. Others: `REST`."""
REST = 1e-6
"""The same for others: losses are in float32, and Adam divides gradients by their own size."""

OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda own: AdamW(own, lr=1e-2),
    "SGD": lambda own: SGD(own, lr=0.05, momentum=0.9),
    "LAMB": lambda own: LAMB(own, lr=1e-2),
    "LARS": lambda own: LARS(own, lr=0.1),
    "LAMB8bit": lambda own: LAMB8bit(own, lr=1e-2, min_8bit_size=32),
    "Muon": lambda own: Muon(_matrices_and_rest(own), lr=1e-2, ns_steps=1),
}
"""More steps of Muon's iteration raise the rounding of bfloat16 in a small singular value above `APART`."""


def _matrices_and_rest(own: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in own if p.dim() == 2], "use_muon": True},
        {"params": [p for p in own if p.dim() != 2], "use_muon": False},
    ]
    return [group for group in groups if group["params"]]


class Residual(nn.Module):
    """A block of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x)).tanh()


class Added(nn.Sequential):
    """A Sequential that adds its input, with the argument that torch names."""

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


class Halved(nn.Sequential):
    """A Sequential with a factor of its own, and another name of its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class Twice(nn.Sequential):
    """A Sequential that goes through its layers twice."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(super().forward(input))


class Kept(nn.Sequential):
    """A Sequential of another name, with the forward of torch."""


def _instance_forward(module: nn.Module) -> None:
    original = type(module).forward
    module.forward = types.MethodType(lambda self, x: 0.5 * original(self, x), module)


HABITS: dict[str, Callable[[nn.Module], Any]] = {
    "pre-hook": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 0.5 + 1.0,)),
    "pre-hook of keywords": lambda m: m.register_forward_pre_hook(
        lambda module, args, kwargs: (tuple(x * 0.5 for x in args), kwargs), with_kwargs=True
    ),
    "hook": lambda m: m.register_forward_hook(lambda module, args, output: _map(output, 0.5)),
    "backward hook": lambda m: m.register_full_backward_pre_hook(
        lambda module, gradients: tuple(g if g is None else g * 0.5 for g in gradients)
    ),
    "forward of the instance": _instance_forward,
}
"""The habits of a user at a module, by name."""
CLASSES = {"Added": Added, "Halved": Halved, "Twice": Twice, "Kept": Kept}


def _map(output: Any, factor: float) -> Any:
    """The output of a module times a number."""
    if isinstance(output, Tensor):
        return output * factor
    for key in ("logits", "last_hidden_state"):
        if key in output:
            output[key] = output[key] * factor
    return output


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a habit, a schedule and an optimizer."""

    seed: int
    num_ranks: int
    model: str
    """"numbers" or "tokens", for a Sequential, or a language model of transformers."""
    num_blocks: int
    tied: bool
    """True if the first and the last layer, or two layers of a Sequential of numbers, are one."""
    habit: str | None
    """A key of HABITS or CLASSES."""
    place: str
    """The module with the habit: "" for the model, or the name of a part."""
    is_late: bool
    """True if a hook is registered after `initialize`."""
    frozen: int | None
    """The block that is not trained."""
    optimizer: str
    config: dict[str, Any]

    def describe(self) -> str:
        """All that was drawn."""
        return "\n  ".join(["pipeline case:", *(f"{key}={value!r}" for key, value in vars(self).items())])

    @property
    def apart(self) -> float:
        return APART.get(self.optimizer, REST)

    @property
    def may_be_refused(self) -> bool:
        """True if a module that is cut has the habit; layers and a Sequential with torch's forward train."""
        return self.habit not in (None, "Kept") and self.place in ("", "transformer", "model")

    def build(self) -> nn.Module:
        """Make the model with its habits, but a late one."""
        torch.manual_seed(self.seed)
        random = Random(f"blocks {self.seed}")
        if self.model in LANGUAGE_MODELS:
            model = LANGUAGE_MODELS[self.model](self.num_blocks, self.tied)
        else:
            model = self._sequential(random)
        model.double()
        if self.frozen is not None:
            _blocks(model)[self.frozen].requires_grad_(False)
        if not self.is_late:
            self.add_habit(model)
        return model

    def add_habit(self, model: nn.Module) -> None:
        """Register the hook, or replace the forward of the instance."""
        if self.habit in HABITS:
            HABITS[self.habit](model.get_submodule(self.place))

    def _sequential(self, random: Random) -> nn.Sequential:
        inner = CLASSES[self.habit] if self.habit in CLASSES and self.place else nn.Sequential
        outer = CLASSES[self.habit] if self.habit in CLASSES and not self.place else nn.Sequential
        blocks = [_draw_block(random, inner) for _ in range(self.num_blocks)]
        if self.model == "numbers":
            layers = [nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, WIDTH)]
        else:
            layers = [nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY, bias=False)]
        if self.tied:
            layers[-1].weight = layers[0].weight
        return outer(*layers)


def _draw_block(random: Random, inner: type[nn.Sequential]) -> nn.Module:
    way = random.random()
    if way < 0.3:
        return Residual()
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return inner(*layers, inner(nn.Linear(WIDTH, WIDTH)) if way < 0.5 else nn.LayerNorm(WIDTH))


def _blocks(model: nn.Module) -> Sequence[nn.Module]:
    for name in ("transformer.h", "model.layers"):
        if any(name == other for other, _ in model.named_modules()):
            return list(model.get_submodule(name).children())
    return list(model.children())[1:-1]


def _gpt(num_blocks: int, tied: bool) -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    sizes = {"n_embd": WIDTH, "n_layer": num_blocks, "n_head": 2, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, **dropout, vocab_size=VOCABULARY, tie_word_embeddings=tied)
    return transformers.GPT2LMHeadModel(config)


def _llama(num_blocks: int, tied: bool) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=12,
        num_hidden_layers=num_blocks,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


LANGUAGE_MODELS = {"gpt": _gpt, "llama": _llama}
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "varuna": 1}
"""The chunks on each rank, by schedule."""


def num_ranks_of(seed: int) -> int:
    """Two pipeline ranks, each of one or two data-parallel ones."""
    return 4 if Random(f"pipeline {seed}").random() < 0.25 else 2


def build_case(seed: int) -> Case:
    """The same case for the same seed, in any process."""
    random = Random(f"pipeline {seed}")
    num_ranks = 4 if random.random() < 0.25 else 2
    schedule, model = random.choice(list(CHUNKS)), random.choice(("numbers", "tokens", *LANGUAGE_MODELS))
    num_blocks = random.randint(2 * CHUNKS[schedule], 5)
    config: dict[str, Any] = {
        "stage": random.choice((0, 1, 2, 3, 3)),
        "mesh": {"pp": 2},
        "pipeline": {
            "schedule": schedule,
            "num_microbatches": random.choice((2, 4)),
            "balance": "memory",
        },
        "recompute": random.choice(("none", "none", "unit")),
        "clip_grad_norm": random.choice((None, 0.1, 10.0)),
        "watchdog_s": 20.0,
    }
    if offload := tiers.draw_offload(seed, config["stage"]):
        config["offload"] = offload
    habit, place = _draw_habit(random, model, num_blocks)
    return Case(
        seed=seed,
        num_ranks=num_ranks,
        model=model,
        num_blocks=num_blocks,
        tied=random.random() < 0.6,
        habit=habit,
        place=place,
        is_late=habit in HABITS and habit != "forward of the instance" and random.random() < 0.3,
        frozen=random.randrange(num_blocks) if random.random() < 0.15 else None,
        optimizer=random.choice(list(OPTIMIZERS)),
        config=config,
    )


def _draw_habit(random: Random, model: str, num_blocks: int) -> tuple[str | None, str]:
    """A habit and its module. Modules of tokens have no hook before."""
    is_drawn, place = random.random() < 0.45, random.randint(1, num_blocks)
    habit = random.choice((*HABITS, *CLASSES))
    is_root = random.random() < 0.6
    if not is_drawn:
        return None, ""
    if model in LANGUAGE_MODELS:
        container = {"gpt": "transformer", "llama": "model"}[model]
        return "hook", random.choice(("", container, "lm_head"))
    if model == "tokens" and is_root and habit in ("pre-hook", "pre-hook of keywords", "Added", "Twice"):
        is_root = False
    return habit, "" if is_root else str(place)


# --------------------------------------------------------------------------------------------- the two runs


def run_case(seed: int) -> list[str]:
    """Return the differences on this rank; none if a case is refused that may be."""
    case = build_case(seed)
    try:
        got = _sharded(case)
    except Exception as error:
        if not (case.may_be_refused and is_refusal(error)):
            raise
        return []
    want = _plain(case, {name for name, _ in got.events})
    first, begun = (Trace([event for event in one.events if "step 0" in event[0]]) for one in (got, want))
    return differences(first, begun, REST) or differences(got, want, case.apart)


def is_refusal(error: Exception) -> bool:
    """True for an error that zeroshard has raised for a user, and not torch or transformers inside a call."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError | RuntimeError) and Path(last.filename).is_relative_to(_PACKAGE)


_PACKAGE = Path(zeroshard.__file__).parent


def _sharded(case: Case) -> Trace:
    trace, model = Trace(), case.build()
    loss_fn = None if case.model in LANGUAGE_MODELS else _loss_fn(case)
    config = dict(case.config)
    if tiers.uses_files(config.get("offload", {})):
        config["offload"] = config["offload"] | {"nvme_path": tempfile.gettempdir()}
    engine = zeroshard.initialize(model, OPTIMIZERS[case.optimizer], config, loss_fn=loss_fn).engine
    if case.is_late:
        case.add_habit(engine.module)
    for number in range(NUM_STEPS):
        size, rank = engine.dp_world_size, engine.dp_rank
        inputs, targets = (whole.chunk(size)[rank] for whole in _batch(case, number))
        given = {"input_ids": inputs} if case.model in LANGUAGE_MODELS else inputs
        trace.note(f"step {number}: evaluation", _mean(engine.eval_batch(given, targets)))
        trace.note(f"step {number}: loss", _mean(engine.train_batch(given, targets)))
        if case.config["clip_grad_norm"] is not None:
            trace.note(f"step {number}: norm", engine.grad_norm.double())
    with engine.unsharded():
        for name, parameter in engine.module.named_parameters(remove_duplicate=False):
            trace.note(f"at the end: {name}", parameter)
    engine.close(restore=False)
    return trace


def _mean(loss: Tensor) -> Tensor:
    """The mean of a loss over the data-parallel ranks; pipeline ranks have the same."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, loss.double())
    return torch.stack(everyone).mean()


def _plain(case: Case, names: set[str]) -> Trace:
    """The same in one process, with the events of these names: a rank has a part of the parameters."""
    trace, model = Trace(), case.build()
    if case.is_late:
        case.add_habit(model)
    optimizer = OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad])

    def loss_of(number: int) -> Tensor:
        inputs, targets = _batch(case, number)
        if case.model in LANGUAGE_MODELS:
            loss: Tensor = model(input_ids=inputs, labels=targets).loss
            return loss.double()  # transformers computes it in float32
        return _loss_fn(case)(model(inputs), targets)

    for number in range(NUM_STEPS):
        with torch.no_grad():
            trace.note(f"step {number}: evaluation", loss_of(number))
        loss = loss_of(number)
        loss.backward()
        trace.note(f"step {number}: loss", loss)
        if (limit := case.config["clip_grad_norm"]) is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
            trace.note(f"step {number}: norm", norm.double())
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        trace.note(f"at the end: {name}", parameter)
    trace.events = [event for event in trace.events if event[0] in names]
    return trace


def _loss_fn(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    if case.model == "numbers":
        return nn.functional.mse_loss
    return lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _batch(case: Case, number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all data-parallel ranks."""
    generator = torch.Generator().manual_seed(100 * case.seed + number)
    if case.model == "numbers":
        made = torch.randn(2, 8, WIDTH, generator=generator, dtype=torch.float64)
        return made[0], made[1]
    tokens = torch.randint(VOCABULARY, (8, LENGTH), generator=generator)
    return tokens, tokens
