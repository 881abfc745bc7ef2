"""The Trainer of transformers over an engine."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import EarlyStoppingCallback, GPT2LMHeadModel, TrainerCallback

from tests.integrations.runs import (
    Texts,
    accelerate_state,
    arguments,
    build_model,
    full_state_dict,
    largest_difference,
    logged,
    trainer,
)
from zeroshard import Config, Precision
from zeroshard.integrations.arguments import join_arguments

# ---------------------------------------------------------------------------------- losses and parameters


def train_beside_ddp(folder, stages, **options):
    """For each stage: the losses of DDP and ours, those of evaluation, and the largest differences."""
    rows = []
    with accelerate_state():
        ddp = trainer(folder, **options)
        ddp.train()
        for stage in stages:
            ours = trainer(folder, {"stage": stage}, **options)
            ours.train()
            norms = zip(logged(ddp, "grad_norm"), logged(ours, "grad_norm"), strict=True)
            rows.append(
                {
                    "losses": (logged(ddp), logged(ours)),
                    "evaluated": (ddp.evaluate()["eval_loss"], ours.evaluate()["eval_loss"]),
                    "norms": max(abs(one - other) for one, other in norms),
                    "parameters": largest_difference(full_state_dict(ours), full_state_dict(ddp))
                    if ours.args.process_index == 0
                    else (full_state_dict(ours), 0.0)[1],
                    "flos": (ddp.state.total_flos, ours.state.total_flos),
                    "sharded": ours.engine.memory_report().parameters if stage == 3 else 0,
                }
            )
            ours.engine.close()
    return rows


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_clipping_losses_and_parameters_are_the_bits_of_ddp(ranks, tmp_path, num_ranks):
    for row in ranks(num_ranks, train_beside_ddp, str(tmp_path), [1, 3], max_grad_norm=0)[0]:
        assert len(row["losses"][0]) == 12 // num_ranks
        assert row["losses"][0] == row["losses"][1]
        assert row["evaluated"][0] == row["evaluated"][1]
        assert row["parameters"] == 0
        assert row["norms"] < 1e-6
        assert row["flos"][0] == row["flos"][1] > 0


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
def test_accumulation_and_clipping_are_those_of_ddp(ranks, tmp_path, max_grad_norm):
    options = {"gradient_accumulation_steps": 4, "max_grad_norm": max_grad_norm}  # the last step has 2
    for row in ranks(2, train_beside_ddp, str(tmp_path), [0, 3], **options)[0]:
        assert len(row["losses"][0]) == 2
        assert row["losses"][1] == pytest.approx(row["losses"][0], abs=1e-6)
        assert row["evaluated"][1] == pytest.approx(row["evaluated"][0], abs=1e-6)
        assert row["norms"] < 1e-6
        assert row["parameters"] < 1e-5
