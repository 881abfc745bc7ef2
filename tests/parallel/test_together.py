"""Divided layers beside everything else that a config can ask for."""

import pytest
import torch

from tests.parallel.runs import compare, divided, plain


def adamw(parameters):
    return torch.optim.AdamW((p for p in parameters if p.requires_grad), lr=1e-2)


def freeze_all_but_norms(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)


CASES = {
    "two micro-batches": ({"gradient_accumulation_steps": 2}, None),
    "all frozen but norms": ({}, freeze_all_but_norms),
    "units compiled": ({"compile": True}, None),
}
"""The fuzz draws recomputation, tiers and other habits over tensor ranks."""


@pytest.mark.long_where(case=["all frozen but norms", "units compiled"])
@pytest.mark.parametrize("case", CASES)
def test_a_divided_model_trains_as_in_one_process(ranks, case):
    config, change = CASES[case]
    runs = ranks(4, divided, config | {"stage": 3, "mesh": {"tp": 2}}, adamw, change, timeout=120)
    compare(runs, plain(adamw, change), losses=1e-9, norms=1e-6, values=1e-8)
