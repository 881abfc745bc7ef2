"""Divided layers beside everything else that a config can ask for."""

import functools
import tempfile

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.parallel.runs import check_same, divided, plain


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


CPU = {"optimizer": "cpu"}
CASES = {
    "two micro-batches": ({"gradient_accumulation_steps": 2}, None),
    "units recomputed": ({"recompute": "unit"}, None),
    "blocks in checkpoints": ({}, checkpoint_blocks),
    "a frozen block": ({}, freeze_a_block),
    "all frozen but norms": ({}, freeze_all_but_norms),
    "units compiled": ({"compile": True}, None),
    "states on the host": ({"offload": {"optimizer": "cpu"}}, None),
    "states on the host, two micro-batches": (
        {"offload": {"optimizer": "cpu"}, "gradient_accumulation_steps": 2},
        None,
    ),
    "steps in the backward": (
        {"offload": {"optimizer": "cpu", "step_in_backward": True}, "clip_grad_norm": None},
        None,
    ),
    "parameters on the host": ({"offload": {"optimizer": "cpu", "parameters": "cpu"}}, None),
    "states in files": ({"offload": {"optimizer": "nvme", "nvme_path": tempfile.gettempdir()}}, None),
    "activations on the host": ({"offload": {"activations": "cpu"}}, None),
    "no prefetch": ({"num_prefetch": 0}, None),
    "kept after forward": ({"reshard_after_forward": False}, None),
}


AT_STAGE_3 = ("steps in the backward", "parameters on the host")


@pytest.mark.long_where(case=["a frozen block"])
@pytest.mark.long_where(num_ranks=[2])
@pytest.mark.long_where(stage=[0, 1, 2])
@pytest.mark.long_where(case=[case for case in CASES if case not in ("two micro-batches", "a frozen block")])
@pytest.mark.parametrize(
    ("case", "stage"),
    [(case, stage) for case in CASES for stage in ((3,) if case in AT_STAGE_3 else (0, 1, 2, 3))],
)
@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 2), (4, 2)])
def test_a_divided_model_trains_as_in_one_process(ranks, case, num_ranks, tp, stage):
    config, change = CASES[case]
    want = plain(adamw, change=change)
    runs = ranks(
        num_ranks, divided, config | {"stage": stage, "mesh": {"tp": tp}}, adamw, change, timeout=120
    )
    check_same(runs)
    for run in runs:
        assert run.losses == pytest.approx(want.losses, rel=1e-9)
        if config.get("clip_grad_norm", 0) is not None:
            assert run.norms == pytest.approx(want.norms, rel=1e-6)  # the norm is rounded to float32
        for key, value in run.state.items():
            torch.testing.assert_close(value, want.state[key], rtol=0, atol=1e-8, msg=key)
