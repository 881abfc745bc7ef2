"""The code of docs/migrating.md about Trainers, accelerate and Lightning runs, and trains the same."""

import pytest

pytest.importorskip("lightning")

import contextlib
import functools
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel, Trainer

import zeroshard
from tests.integrations.classifier import Classifier
from tests.integrations.classifier import loader as pairs
from tests.integrations.runs import (
    Texts,
    accelerate_state,
    arguments,
    build_model,
    largest_difference,
    logged,
)
from tests.migrating import SECTIONS, blocks
from tests.ranks import on_ranks


def execute(section, first_line, folder, names):
    """Execute a block in a folder of its own; give back its names."""
    (block,) = blocks(SECTIONS[section], first_line)
    Path(folder, first_line).mkdir(exist_ok=True, parents=True)
    with contextlib.chdir(Path(folder, first_line)):
        exec(block, names)
    return names


def load(folder, first_line):
    if dist.is_initialized():
        dist.barrier()  # rank 0 writes it
    return GPT2LMHeadModel.from_pretrained(Path(folder, first_line, "out")).state_dict()


@pytest.mark.long
@on_ranks(2)
def test_a_trainer_becomes_one_with_the_same_losses_and_model(tmp_path):
    found = []
    for first_line in ("Trainer", "zeroshard with a Trainer"):
        names = {"Trainer": Trainer, "model": build_model(), "resume": None}
        names |= {"train_dataset": Texts(16), "eval_dataset": Texts(4)}
        with accelerate_state():
            names["args"] = arguments(tmp_path, num_train_epochs=2, gradient_accumulation_steps=2)
            execute("the Trainer of transformers and TRL", first_line, tmp_path, names)
        found.append((logged(names["trainer"]), load(tmp_path, first_line)))
    (expected, theirs), (losses, ours) = found
    assert len(losses) == 4
    assert losses == pytest.approx(expected, abs=1e-6)
    assert largest_difference(ours, theirs) < 1e-5


@on_ranks(2)
def test_an_accelerate_loop_becomes_one_with_the_same_losses_and_model(tmp_path):
    found = []
    # accelerate steps a schedule once for each process
    for first_line, pace in (("accelerate", 2), ("zeroshard with accelerate", 1)):
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        decay = functools.partial(lambda step, pace: 0.5 ** (step // pace), pace=pace)
        names = {
            "Accelerator": functools.partial(Accelerator, cpu=True),
            "zeroshard": zeroshard,
            "model": model,
            "optimizer": optimizer,
            "loader": DataLoader(Texts(16), batch_size=2),
            "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, decay),
            "losses": [],
        }
        with accelerate_state():
            execute("accelerate", first_line, tmp_path, names)
        assert names["optimizer"].param_groups[0]["lr"] == 1e-2 * 0.5**2
        found.append((names["losses"], load(tmp_path, first_line)))
    (expected, theirs), (losses, ours) = found
    assert len(losses) == 4
    assert losses == pytest.approx(expected, abs=1e-6)
    assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.long
@on_ranks(2)
def test_a_trainer_of_lightning_becomes_one_with_the_same_losses_and_model(tmp_path):
    modules = []
    for first_line in ("Lightning", "zeroshard with Lightning"):
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        kind = functools.partial(lightning.Trainer, accelerator="cpu", devices=2, **quiet)
        module = Classifier()
        torch.manual_seed(1)
        execute("Lightning", first_line, tmp_path, {"Trainer": kind, "module": module, "loader": pairs()})
        modules.append(module)
    ddp, ours = modules
    assert len(ddp.losses) == 12
    assert ours.losses == ddp.losses
    assert largest_difference(ours.state_dict(), ddp.state_dict()) == 0
