"""What a user does beside training, at a place of a step: each act is data, drawn once for a case.

An act calls what `Sharded` and `Reference` both have, and notes what they return; so the two are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

Note = Callable[[str, Any], None]
"""Keeps a value under its name."""

END = -1
"""The place after a step, for a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """Done once, by all ranks."""

    step: int
    micro: int = END
    """The micro-batch after whose backward it is done, or END."""

    def perform(self, trainer: Any, note: Note) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Restart(Act):
    """Close the engine, and make another one of any stage over the model."""

    stage: int

    def perform(self, trainer: Any, note: Note) -> None:
        trainer.restart(self.stage)


@dataclass(frozen=True, kw_only=True)
class Save(Act):
    """Save a checkpoint, or the part of it without the optimizer."""

    optimizer: bool
    blocking: bool

    def perform(self, trainer: Any, note: Note) -> None:
        trainer.save(optimizer=self.optimizer, blocking=self.blocking)


@dataclass(frozen=True, kw_only=True)
class Load(Act):
    """Load it, or its model alone; refused where frozen parameters were left out and are others."""

    optimizer: bool

    def perform(self, trainer: Any, note: Note) -> None:
        note("checkpoint", "loaded" if trainer.load(optimizer=self.optimizer) else "refused")


@dataclass(frozen=True, kw_only=True)
class Read(Act):
    """Read every parameter, gradient and state by name."""

    def perform(self, trainer: Any, note: Note) -> None:
        for name in trainer.names:
            note(f"parameter {name}", trainer.full_parameter(name))
            note(f"gradient of {name}", trainer.full_gradient(name))
            states = trainer.full_optimizer_state(name)
            note(f"states of {name}", sorted(states))
            for key, value in states.items():
                note(f"{key} of {name}", value)


@dataclass(frozen=True, kw_only=True)
class SetParameters(Act):
    """Give some parameters other values."""

    seed: int

    def perform(self, trainer: Any, note: Note) -> None:
        for name, values in _some(trainer, self.seed):
            trainer.set_full_parameter(name, 0.3 * values)


@dataclass(frozen=True, kw_only=True)
class SetGradients(Act):
    """Give some parameters that are trained, also those that have none, another gradient."""

    seed: int

    def perform(self, trainer: Any, note: Note) -> None:
        for name, values in _some(trainer, self.seed):
            if trainer.is_trained(name):
                trainer.set_full_gradient(name, values)


@dataclass(frozen=True, kw_only=True)
class SetStates(Act):
    """Halve the states of some parameters, and count a step more."""

    seed: int

    def perform(self, trainer: Any, note: Note) -> None:
        for name, _ in _some(trainer, self.seed):
            states = trainer.full_optimizer_state(name)
            changed = {key: value + 1 if key == "step" else value * 0.5 for key, value in states.items()}
            trainer.set_full_optimizer_state(name, changed)


@dataclass(frozen=True, kw_only=True)
class Record(Act):
    """Give the model to a tracer, which a sharded one refuses."""

    tracer: str

    def perform(self, trainer: Any, note: Note) -> None:
        trainer.record(self.tracer)


def _some(trainer: Any, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Names and values of their shapes, the same on all ranks."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    for name in trainer.names:
        values = torch.randn(trainer.shape_of(name), generator=generator)
        if random.random() < 0.3:
            yield name, values


def draw_acts(seed: int, loop: str, num_micro_batches: list[int], *, restarts: bool) -> tuple[Act, ...]:
    """The acts of a case, in the order in which they are done at the same place.

    Args:
        num_micro_batches: of each step.
        restarts: whether another engine follows the first one.
    """
    random, num_steps = Random(f"acts {seed}"), len(num_micro_batches)

    def step() -> dict[str, int]:
        return {"step": random.randrange(num_steps)}

    def within() -> dict[str, int]:
        """After a step, or inside one where the loop lets the user in."""
        place = step()
        if loop != "train_batch" and random.random() < 0.7:
            last = num_micro_batches[place["step"]] - 1
            place["micro"] = random.randint(0, last) if loop == "engine" else last
        return place

    acts: list[Act] = []
    if random.random() < 0.2:
        saved = random.randrange(num_steps)
        loaded = random.randrange(saved, num_steps)
        acts.append(Save(step=saved, optimizer=random.random() < 0.7, blocking=random.random() < 0.6))
        acts.append(Load(step=loaded, optimizer=random.random() < 0.7))
    if random.random() < 0.1:
        acts.append(SetParameters(**step(), seed=random.randrange(99)))
    if random.random() < 0.15 and loop != "train_batch":
        acts.append(SetGradients(**within() | {"micro": 0}, seed=random.randrange(99)))
    if random.random() < 0.1:
        acts.append(SetStates(**step(), seed=random.randrange(99)))
    if random.random() < 0.1:
        acts.append(Record(**step(), tracer=random.choice(("linearize", "make_fx"))))
    if random.random() < 0.2:
        acts.append(Read(**within()))
    if restarts:
        acts.insert(random.randint(0, len(acts)), Restart(**step(), stage=random.choice((0, 1, 2, 3))))
    return tuple(acts)
