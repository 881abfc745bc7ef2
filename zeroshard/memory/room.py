"""The check that a node has room for what tiers need, before any memory is taken."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.assemble import read_setting
from zeroshard.config.sections import Config
from zeroshard.memory.tiered import States, TierBytes, bytes_on_tiers
from zeroshard.optim.statenames import num_bits, rule_of
from zeroshard.plan.buffers import plan_units
from zeroshard.plan.tiers import Tier
from zeroshard.plan.units import UnitSpec
from zeroshard.tiers.budget import Alternative, check_budget


def states_of(optimizer: Optimizer | None) -> States:
    """Return the states of an optimizer; none for one that is not known, as nobody can count them."""
    rule = None if optimizer is None else rule_of(optimizer)
    if optimizer is None or rule is None:
        return States(num=0)
    largest = max((p for group in optimizer.param_groups for p in group["params"]), key=Tensor.numel)
    return States(num=len(rule.states), bits=num_bits(optimizer, largest))


def check_room(
    specs: Sequence[UnitSpec],
    config: Config,
    sizes: Mapping[str, int],
    states: States,
    *,
    host_computes: bool,
    num_ranks: int,
) -> None:
    """Refuse a job that this node has no room for. Call it on all ranks before one of them allocates.

    Args:
        specs: the units of the model.
        config: the config of the job.
        sizes: the number of ranks of each axis.
        states: the states of the optimizer.
        host_computes: True for ranks on the CPU, whose device is host memory.
        num_ranks: the ranks of the job, for a launcher that does not tell those on this node.

    Raises:
        ValueError: a folder is not there.
        RuntimeError: the node has less; the message tells the bytes of each kind, and what needs less.
    """

    def count(config: Config, states: States) -> dict[Tier, TierBytes]:
        setting = read_setting(config, sizes, host_computes=host_computes)
        plans = plan_units(specs, setting)
        return bytes_on_tiers(plans, setting, config.gradient_accumulation_steps, states)

    tiers = count(config, states)
    host, disk = tiers[Tier.HOST], tiers[Tier.DISK]
    if not host.total and not disk.total:
        return
    needed = {
        "main parameters and copies of them": host.parameters,
        "gradients": host.gradients,
        "optimizer states": host.optimizer,
        "buffers for the units in files": host.buffers,
    }
    alternatives = []
    for text, other, other_states in _alternatives(config, states):
        found = count(other, other_states)
        alternatives.append(Alternative(text, found[Tier.HOST].total, found[Tier.DISK].total))
    check_budget(
        {kind: num_bytes for kind, num_bytes in needed.items() if num_bytes},
        disk.total,
        (config.offload.nvme_path or "").split(":") if disk.total else [],
        int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)),
        alternatives,
    )


def _alternatives(config: Config, states: States) -> Iterator[tuple[str, Config, States]]:
    """Yield settings that need less, each together with those before it."""
    offload, text = config.offload, ""
    if states.num and states.bits == 32:
        text, states = _joined(text, "an optimizer with states of 8 bits"), replace(states, bits=8)
        yield text, config, states
    if config.precision.main_dtype is not torch.bfloat16 and not config.ignored:
        text = _joined(text, 'precision.main_dtype="bf16"')
        config = replace(config, precision=replace(config.precision, main_dtype=torch.bfloat16))
        yield text, config, states
    if offload.optimizer == "cpu":
        text = _joined(text, 'offload.optimizer="nvme"')
        path = offload.nvme_path or "."
        config = replace(config, offload=replace(offload, optimizer="nvme", nvme_path=path))
        yield text, config, states
    if offload.parameters == "cpu":
        text = _joined(text, 'offload.parameters="nvme"')
        path = offload.nvme_path or "."
        config = replace(config, offload=replace(config.offload, parameters="nvme", nvme_path=path))
        yield text, config, states


def _joined(text: str, more: str) -> str:
    return f"{text}, and {more}" if text else more
