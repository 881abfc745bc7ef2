"""Places outside of the device for the values of a case; drawn apart, so that seeds keep their cases."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from tests.fuzz.acts import END, Read, SetGradients
from tests.fuzz.muon import MUON

if TYPE_CHECKING:
    from tests.fuzz.cases import Case

SHARE = 0.3
"""Of the cases that may have some."""


def draw_offload(seed: int, stage: int) -> dict[str, Any]:
    """`Config.offload` without nvme_path, or nothing."""
    random = Random(f"offload {seed}")
    drawn = {
        "optimizer": random.choice(("none", "cpu", "nvme", "nvme")),
        "parameters": random.choice(("none", "cpu", "nvme")),
        "activations": random.choice(("none", "none", "cpu")),
        "device_fraction": random.choice((0.0, 0.0, 0.5)),
    }
    return allowed(drawn, stage) if random.random() < SHARE else {}


def allowed(offload: dict[str, Any], stage: int) -> dict[str, Any]:
    """The part of it that a stage has."""
    kept = dict(offload)
    if stage < 3:
        kept.pop("parameters", None)
    if stage < 1:
        kept.pop("optimizer", None)
    if kept.get("optimizer", "none") == "none":
        kept.pop("device_fraction", None)
    if stage < 3:
        kept.pop("step_in_backward", None)
    return kept


def step_early(case: Case) -> Case:
    """Let some cases step units in the backward, without what that refuses.

    There is one backward for each micro-batch and none that fails, and nobody asks for gradients.
    """
    config = case.config
    is_far = config["stage"] == 3 and config.get("offload", {}).get("optimizer", "none") != "none"
    is_judged = case.loop == "plain" or "loss_scale" in config["precision"]
    if not is_far or is_judged or case.optimizer == MUON or Random(f"early {case.seed}").random() < 0.5:
        return case
    config["offload"]["step_in_backward"] = True
    config.pop("clip_grad_norm", None)
    steps = tuple(
        replace(
            step,
            is_split=False,
            unsynced=(*step.unsynced[:-1], False),
            fails=None if step.fails is not None and step.fails[0] == "backward" else step.fails,
        )
        for step in case.steps
    )
    acts = tuple(a for a in case.habits.acts if a.micro == END and not isinstance(a, Read | SetGradients))
    return replace(case, steps=steps, habits=replace(case.habits, acts=acts))


def uses_files(offload: dict[str, Any]) -> bool:
    """True if it needs a folder."""
    return "nvme" in offload.values()
