"""Models of transformers inside a module of the user's, such as one with a value head.

A case trains two steps, compares losses and parameters with plain PyTorch, and tries doors of the inner
model: methods that see slices. Each is refused by name, or does what it does in plain PyTorch.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import zeroshard
from tests.fuzz.pipeline import LANGUAGE_MODELS, LENGTH, OPTIMIZERS, VOCABULARY, WIDTH, is_refusal
from tests.fuzz.run import Trace, differences

NUM_STEPS = 2
ROWS = 4
"""The size of the batch of all ranks."""
APART = 1e-9
"""The part of its norm by which a value may be off: ranks add up in another order."""


class ValueHead(nn.Module):
    """A language model and a number for each token; the loss is the sum of both.

    It is all in float64: transformers computes a loss in float32, and a scale that comes near zero shows it.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.value = inner, nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        output = self.inner(input_ids=tokens, output_hidden_states=True)
        loss = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss + self.value(output.hidden_states[-1]).square().mean()


class Backbone(nn.Module):
    """The model without its head, as a reward model has it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.value = inner.base_model, nn.Linear(WIDTH, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.value(self.inner(input_ids=tokens).last_hidden_state).square().mean()


class Deeper(nn.Module):
    """A wrapper around a wrapper."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped, self.scale = wrapped, nn.Parameter(torch.tensor(0.5))

    @property
    def inner(self) -> nn.Module:
        return self.wrapped.inner  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.wrapped(tokens) * self.scale


@dataclass(frozen=True, kw_only=True)
class Case:
    """A wrapped model, a config, and the doors that are tried in their order."""

    seed: int
    num_ranks: int
    model: str
    """A key of LANGUAGE_MODELS."""
    wrapper: str
    is_deeper: bool
    tied: bool
    optimizer: str
    config: dict[str, Any]
    doors: tuple[str, ...]
    """Keys of DOORS."""

    def describe(self) -> str:
        """All that was drawn."""
        return "\n  ".join(["wrapped case:", *(f"{key}={value!r}" for key, value in vars(self).items())])

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        inner = LANGUAGE_MODELS[self.model](2, self.tied)
        wrapped = {"ValueHead": ValueHead, "Backbone": Backbone}[self.wrapper](inner)
        return (Deeper(wrapped) if self.is_deeper else wrapped).double()


def num_ranks_of(seed: int) -> int:
    """One or two data-parallel ranks."""
    return 1 if Random(f"wrapped {seed}").random() < 0.25 else 2


def build_case(seed: int) -> Case:
    """The same case for the same seed, in any process."""
    random = Random(f"wrapped {seed}")
    num_ranks = 1 if random.random() < 0.25 else 2
    return Case(
        seed=seed,
        num_ranks=num_ranks,
        model=random.choice(list(LANGUAGE_MODELS)),
        wrapper=random.choice(("ValueHead", "Backbone")),
        is_deeper=random.random() < 0.3,
        tied=random.random() < 0.5,
        optimizer=random.choice(("AdamW", "SGD", "LAMB")),
        config={
            "stage": random.choice((0, 1, 2, 3, 3, 3)),
            "recompute": random.choice(("none", "none", "unit")),
            "clip_grad_norm": random.choice((None, 0.1)),
            "watchdog_s": 20.0,
        },
        doors=tuple(random.sample(list(DOORS), random.randint(1, 3))),
    )


# ------------------------------------------------------------------------------------------------ the doors


def _saved(inner: nn.Module) -> dict[str, Tensor]:
    """Return the values of a folder of save_pretrained; rank 0 writes it, as scripts do."""
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(folders, own)
        try:
            inner.save_pretrained(folders[0], is_main_process=own == folders[0])  # type: ignore[operator]
        finally:
            dist.barrier()
        try:
            loaded: Any = type(inner).from_pretrained(folders[0], dtype=torch.float64)  # type: ignore
        finally:
            dist.barrier()
        return dict(loaded.state_dict())


def _copied(inner: nn.Module) -> dict[str, Tensor]:
    return dict(copy.deepcopy(inner).state_dict())


def _generated(inner: nn.Module) -> dict[str, Tensor]:
    if not hasattr(inner, "generate") or not isinstance(inner, transformers.GenerationMixin):
        return {}
    with torch.no_grad():
        prompt = torch.arange(1, 4)[None]
        return {"tokens": inner.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)}


DOORS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "save_pretrained": _saved,
    "deepcopy": _copied,
    "generate": _generated,
}
"""Calls of the inner model, with what comes of them."""


# --------------------------------------------------------------------------------------------- the two runs


def run_case(seed: int) -> list[str]:
    """Return the differences on this rank. A door may be refused, or its change at the next call."""
    case = build_case(seed)
    model, trace = case.build(), Trace()
    engine = zeroshard.initialize(model, OPTIMIZERS[case.optimizer], case.config).engine
    plain = case.build()
    optimizer = OPTIMIZERS[case.optimizer](list(plain.parameters()))
    want = Trace()
    for number in range(NUM_STEPS):
        _train_plain(case, plain, optimizer, number, want)
        _train(engine, number, case, trace)
    _compare(engine, plain, "after training", trace, want)
    for door in case.doors:
        what = f"{door}()"
        end, found = _try(door, engine.module.inner)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, end)
        if len(set(everyone)) > 1 or end not in ("refused", "done"):
            return [f"{what}: {everyone}"]
        if end == "done":
            for name, value in found.items():
                trace.note(f"{what}: {name}", value)
            for name, value in DOORS[door](plain.inner).items():
                want.note(f"{what}: {name}", value)
        try:
            _train(engine, NUM_STEPS, case, trace, what)
        except Exception as error:
            if end == "refused" or not is_refusal(error):  # a refused call has changed nothing
                raise
            break
        _train_plain(case, plain, optimizer, NUM_STEPS, want, what)
        _compare(engine, plain, what, trace, want)
    engine.close(restore=False)
    return differences(trace, want, APART)


def _try(door: str, inner: nn.Module) -> tuple[str, dict[str, Tensor]]:
    """How a call ended, and what came of it."""
    try:
        return "done", DOORS[door](inner)
    except Exception as error:
        return "refused" if is_refusal(error) else f"{type(error).__name__}: {error}", {}


def _compare(engine: Any, plain: nn.Module, what: str, trace: Trace, want: Trace) -> None:
    with engine.unsharded():
        for name, parameter in engine.module.named_parameters():
            trace.note(f"{what}: parameter {name}", parameter)
    for name, parameter in plain.named_parameters():
        want.note(f"{what}: parameter {name}", parameter)


def _batch(case: Case, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * case.seed + number)
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)


def _train(engine: Any, number: int, case: Case, trace: Trace, what: str = "") -> None:
    loss = engine(_batch(case, number).chunk(engine.dp_world_size)[engine.dp_rank])
    engine.backward(loss)
    engine.step()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, loss.detach())
    trace.note(f"{what} step {number}: loss", torch.stack(everyone).mean())


def _train_plain(
    case: Case, model: nn.Module, optimizer: Any, number: int, want: Trace, what: str = ""
) -> None:
    loss = model(_batch(case, number))
    loss.backward()
    if (limit := case.config["clip_grad_norm"]) is not None:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm.float())  # as engine.grad_norm is
    optimizer.step()
    optimizer.zero_grad()
    want.note(f"{what} step {number}: loss", loss)
