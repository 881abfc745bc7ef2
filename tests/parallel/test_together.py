"""Divided layers beside everything else that a config can ask for."""

import functools
import tempfile

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.parallel.runs import compare, divided, plain


def adamw(parameters):
    return torch.optim.AdamW((p for p in parameters if p.requires_grad), lr=1e-2)


def freeze_a_block(model):
    model.blocks[0].requires_grad_(False)


def freeze_all_but_norms(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)


def checkpoint_blocks(model):
    for block in model.blocks:
        forward = block.forward
        block.forward = functools.partial(checkpoint, forward, use_reentrant=False)


FILES = {"optimizer": "nvme", "nvme_path": tempfile.gettempdir()}
EARLY = {"optimizer": "cpu", "step_in_backward": True}
CASES = {
    "two micro-batches": ({"gradient_accumulation_steps": 2}, None),
    "units recomputed": ({"recompute": "unit"}, None),
    "blocks in checkpoints": ({}, checkpoint_blocks),
    "a frozen block": ({}, freeze_a_block),
    "all frozen but norms": ({}, freeze_all_but_norms),
    "units compiled": ({"compile": True}, None),
    "steps in the backward": ({"offload": EARLY, "clip_grad_norm": None}, None),
    "parameters on the host": ({"offload": {"optimizer": "cpu", "parameters": "cpu"}}, None),
    "states in files, two micro-batches": ({"offload": FILES, "gradient_accumulation_steps": 2}, None),
    "activations on the host": ({"offload": {"activations": "cpu"}}, None),
}
"""The fuzz draws pairs of these."""
AT_STAGE_3 = ("steps in the backward", "parameters on the host")


@pytest.mark.long_where(case=[case for case in CASES if case != "two micro-batches"])
@pytest.mark.long_where(num_ranks=[2])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 1), (4, 3)])
def test_a_divided_model_trains_as_in_one_process(ranks, case, num_ranks, stage):
    config, change = CASES[case]
    config = config | {"stage": 3 if case in AT_STAGE_3 else stage, "mesh": {"tp": 2}}
    runs = ranks(num_ranks, divided, config, adamw, change, timeout=120)
    norms = None if "clip_grad_norm" in config else 1e-6
    compare(runs, plain(adamw, change), losses=1e-9, norms=norms, values=1e-8)
