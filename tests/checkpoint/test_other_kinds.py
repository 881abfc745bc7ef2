"""Checkpoints whose values are of other kinds than those that are saved, and links in the place of files."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from tests.checkpoint.damage import PART, damaged, edit_manifest, edit_values, message_of
from tests.checkpoint.runs import differences, start, state, train
from tests.ranks import on_ranks
from zeroshard.checkpoint.files import MANIFEST, TENSORS, VALUES


def update(path: str, value: Any) -> Callable[[Path], None]:
    """Another value at a place in the values, such as groups/0/lr; `*` is any one key."""

    def change(values: Any) -> None:
        *steps, last = path.split("/")
        for step in steps:
            key = next(iter(values)) if step == "*" else int(step) if step.isdigit() else step
            values = values[key]
        values[int(last) if last.isdigit() else last] = value

    return edit_values(change)


NAN = float("nan")
VALUES_OF_OTHER_KINDS: dict[str, tuple[Any, ...]] = {
    "groups/0/names": (3, None),
    "groups/0": (3, [], None),
    "scalars/*": (3, [], None),
    "other/*": (),
    "lr_scheduler": (3, [], "x"),
    "rng/0": (3, None, {}),
    "rng/1/torch": ("x", torch.zeros(3), torch.zeros(5056), torch.zeros(5056, dtype=torch.uint8)),
    "rng/1/python/0": (),
    "rng/0/python": ((3, (1, 2), None), (3, tuple(range(625)), "x"), (3, (0,) * 624 + (9999,), None), "x"),
    "rng/0/numpy": ("x", ["MT19937", [0] * 624, 1 << 30, 0, 0.0], ["MT19937", [0] * 624, -5, 0, 0.0]),
    "rng/0/numpy ": (["MT19937", [0] * 9, 3, 0, 0.0], ["MT19937", [0] * 624, 3, 0, "x"]),
    "extra/3": (),
    "client_state": (3, [], None),
}
"""By place: values that are not of the kind that is there. (A space at the end makes another key.)"""

CRAFTED_VALUES = {
    f"{path} {number}": update(path.strip(), value)
    for path, values in VALUES_OF_OTHER_KINDS.items()
    for number, value in enumerate(values)
}


CRAFTED_MANIFESTS = {
    f"{key} {value!r}": edit_manifest(lambda content, key=key, value=value: content.update({key: value}))
    for key, values in {
        "global_step": (-7, True, 1 << 60, 1.0, None),
        "skipped_steps": (-1, False, 1 << 60),
        "optimizer": (3, []),
        "lr_scheduler": (3,),
        "model": (3, []),
        "loss_scale": [{"value": value, "is_dynamic": True, "num_steps": 0} for value in ("x", None, 1)]
        + [{"value": 2.0, "is_dynamic": "x", "num_steps": 0}]
        + [{"value": 2.0, "is_dynamic": True, "num_steps": -1}],
        "rounding": ({"seed": 1, "step": -1}, {"seed": "x", "step": 1}, {"seed": 1, "step": 0.5}),
        "data": ({"x": 1}, {"epoch": -1, "position": 0, "seed": 0, "num_samples": 10}),
    }.items()
    for value in values
}


def link(name: str, target: str = "") -> Callable[[Path], None]:
    """A link in the place of a file, to a file that is as good."""

    def craft(directory: Path) -> None:
        outside = directory.parent / f"of {name}"
        shutil.copy(directory / name, outside)
        (directory / name).unlink()
        (directory / name).symlink_to(target or outside)

    return craft


LINKS = {name: link(name) for name in (".metadata", VALUES, TENSORS, MANIFEST, PART)} | {
    "to nowhere": lambda directory: link(PART, "nowhere")(directory)
}


CRAFTED = {"values": CRAFTED_VALUES, "manifest": CRAFTED_MANIFESTS, "links": LINKS}


class Small(nn.Module):
    """Two units, so that each rank holds something of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def loss(engine: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return engine(torch.randn(4, 20, generator=generator)).square().mean()


def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=9)


def generators() -> Any:
    _, keys, *rest = numpy.random.get_state()
    return random.getstate(), torch.get_rng_state().tolist(), keys.tolist(), rest


@pytest.mark.parametrize("kind", CRAFTED)
@on_ranks(2, timeout=120)
def test_values_of_other_kinds_and_links_are_refused_before_anything_changes(tmp_path, kind):
    """What was not refused as it should be, or changed something."""
    found: list[str] = []
    good = tmp_path / "good"
    data = torch.utils.data.TensorDataset(torch.arange(10))
    engine = start(3, model=Small(), lr_scheduler=schedule, training_data=data)
    train(engine, [0], loss)
    engine.save_checkpoint(good, "tag")
    train(engine, [1], loss)
    before, drawn = state(engine), generators()
    for name, craft in CRAFTED[kind].items():
        bad = damaged(good, craft, "tag.0")
        text = message_of(lambda bad=bad: engine.load_checkpoint(bad))  # type: ignore[misc]
        found += [] if f"{bad / 'tag.0'}/" in text else [f"{name}: {text}"]
        found += [f"{name}: {len(text)} characters"] * (len(text) > 600)
        found += [f"{name}: loaded in part: {text}"] * ("in part" in text)
    found += ["generators"] * (generators() != drawn)
    found += differences(state(engine), before)
    engine.load_checkpoint(good)
    assert engine.global_step == 1
    return found


@on_ranks(2)
def test_a_directory_that_is_a_link_is_loaded(tmp_path):
    engine = start(3, model=Small())
    train(engine, [0], loss)
    engine.save_checkpoint(tmp_path / "real", "tag")
    if dist.get_rank() == 0:
        (tmp_path / "link").symlink_to(tmp_path / "real")
        (tmp_path / "direct").symlink_to(tmp_path / "real" / "tag.0")
    dist.barrier()
    want = state(engine)
    for path in (tmp_path / "link", tmp_path / "direct", tmp_path / "link" / "tag.0"):
        other = start(3, model=Small(), seed=1)
        other.load_checkpoint(path)
        if found := differences(state(other), want):
            return found
    return []
