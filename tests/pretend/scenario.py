"""A scenario: a training run on a few ranks, by name. `tests/pretend/scenarios/` has them all.

@scenario(may_sync=("stepping/guard.py",))
def nonfinite_gradients_are_skipped(bench: Bench) -> None:
    bench.start(GPT(tied=False), stage=3, nonfinite="skip")
    bench.train(steps=3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard
from tests.distributed.models import GPT
from tests.pretend.trace import Trace

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
VOCABULARY, BATCH = 500, (2, 8)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)  # as on an accelerator


class Bench:
    """What a scenario works with: this rank, and an engine over the pretend device."""

    def __init__(self, rank: int, size: int, trace: Trace, folder: Path) -> None:
        self.rank, self.size, self.trace, self.folder = rank, size, trace, folder
        self.engine: Any = None
        self.later: list[Callable[[], None]] = []
        """Comparisons with CPU ranks, made after the end of the trace unless the engine was broken."""

    def gpt(self, num_blocks: int = 3, *, tied: bool = False) -> GPT:
        return GPT(tied=tied, num_blocks=num_blocks, width=16, heads=2)

    def start(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer | Optimizer | None = adamw,
        given: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> Any:
        """Initialize an engine with what is given besides; it is `self.engine` from now on."""
        config = {"watchdog_s": 60.0, "num_prefetch": 1} | config  # as units of models of a real size have it
        with self.trace.syncs_allowed():
            self.engine = zeroshard.initialize(model, optimizer, config, **given or {}).engine
        for unit in self.engine._runtime.units:
            for number, buffer in enumerate(unit.buffers):
                self.trace.name(buffer.full, f"full[{number}] of {unit.described}")
                self.trace.name(buffer.main, f"main[{number}] of {unit.described}")
        return self.engine

    def compare_later(self, found: list[Tensor], run: Callable[[], list[Tensor]]) -> None:
        """Compare values with those of another run without the pretend device."""

        def compare() -> None:
            assert all(torch.equal(one, other) for one, other in zip(found, run(), strict=True))

        self.later.append(compare)

    def tokens(self, number: int) -> Tensor:
        """A micro-batch, other ones on other ranks."""
        generator = torch.Generator().manual_seed(100 * number + self.rank)
        return torch.randint(0, VOCABULARY, BATCH, generator=generator)

    def values(self, number: int) -> Tensor:
        """[5, 7], other ones on other ranks."""
        return torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * number + self.rank))

    def loss(self, number: int) -> Tensor:
        """Forward of a language model."""
        tokens = self.tokens(number)
        out = self.engine(tokens)
        logits = out["logits"] if isinstance(out, dict) else out
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    def train(self, steps: int, first: int = 0) -> list[Tensor]:
        """Micro-batches of a language model, a step after each; returns their losses."""
        losses = []
        for number in range(first, first + steps):
            loss = self.loss(number)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return losses

    def evaluate(self, number: int = 50) -> None:
        self.engine.eval()
        with torch.no_grad():
            self.loss(number)
        self.engine.train()

    def train_on(self, steps: int, *args_of: Callable[[int], Any], first: int = 0) -> None:
        """Steps of a model of [n, 7]; `args_of` give its further arguments for each step."""
        for number in range(first, first + steps):
            out = self.engine(self.values(number), *(argument(number) for argument in args_of))
            self.engine.backward(out.float().square().mean())
            self.engine.step()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training run that must have no findings."""

    name: str
    run: Callable[[Bench], None]
    num_ranks: int = 2
    may_sync: tuple[str, ...] = ()
    """Where the host may wait for the device: parts of the places that findings name."""


SCENARIOS: dict[str, Scenario] = {}


def add(name: str, run: Callable[[Bench], None], *, num_ranks: int = 2, may_sync: Iterable[str] = ()) -> None:
    """Make a scenario known."""
    assert name not in SCENARIOS, f"there is a scenario {name!r} already"
    SCENARIOS[name] = Scenario(name=name, run=run, num_ranks=num_ranks, may_sync=tuple(may_sync))


def scenario(*, num_ranks: int = 2, may_sync: Iterable[str] = ()) -> Callable[[Any], Any]:
    """Make a function a scenario of its own name."""

    def register(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
        add(run.__name__, run, num_ranks=num_ranks, may_sync=may_sync)
        return run

    return register
