"""Checkpoints in part: the weights alone, and without what is frozen."""

import re
import zlib

import pytest
import torch
from torch import nn

from tests.checkpoint.runs import refused, saved, square_loss, start, state, train
from tests.distributed.training import SOME_STAGES
from tests.ranks import on_ranks
from zeroshard.checkpoint.manifest import read_manifest
from zeroshard.checkpoint.tensors import open_checkpoint
from zeroshard.cli.main import main


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@on_ranks(2)
def test_weights_load_without_touching_optimizer_schedule_and_progress(tmp_path):
    engine = saved(tmp_path, client_state={"n": 1}, lr_scheduler=schedule)
    weights, found = engine.full_state_dict(), []
    for stage in SOME_STAGES:
        other = start(stage, seed=1, lr_scheduler=schedule)
        train(other, [0])
        before, drawn = state(other), torch.get_rng_state()
        assert other.load_checkpoint(tmp_path, optimizer=False) == {"n": 1}
        after = state(other)
        expected = before.tensors | weights
        found += [(stage, name) for name in expected if not torch.equal(after.tensors[name], expected[name])]
        found += [] if after.values == before.values else [(stage, before.values, after.values)]
        found += [] if torch.equal(torch.get_rng_state(), drawn) else ["generators"]
        train(other, [2])
    return found


def save_weights(folder):
    engine = start(3, lr_scheduler=schedule)
    train(engine, [0, 1])
    engine.save_checkpoint(folder, optimizer=False)
    weights = engine.full_state_dict()
    other = start(2, seed=1, lr_scheduler=schedule)
    train(other, [5])
    before = state(other).tensors
    with pytest.warns(UserWarning, match="holds no optimizer state: the optimizer keeps"):
        other.load_checkpoint(folder)
    after = state(other).tensors
    names = [name for name in after if not torch.equal(after[name], weights.get(name, before[name]))]
    return names, other.global_step


def test_what_is_saved_without_an_optimizer_has_no_state_and_loads(ranks, tmp_path):
    assert ranks(2, save_weights, tmp_path) == [([], 2)] * 2
    names = open_checkpoint(tmp_path / "step-2.0").tensors
    assert not [name for name in names if name.startswith("optimizer/")]


# ------------------------------------------------------------------------------------ without the frozen


class Adapted(nn.Module):
    """A frozen base in bfloat16, tied with itself, and trained adapters."""

    def __init__(self, base_seed=7):
        super().__init__()
        torch.manual_seed(base_seed)
        self.base = (
            nn.ModuleList(nn.Linear(40, 40) for _ in range(2)).to(torch.bfloat16).requires_grad_(False)
        )
        self.again = nn.Linear(40, 40, dtype=torch.bfloat16).requires_grad_(False)
        self.again.weight = self.base[0].weight
        torch.manual_seed(torch.initial_seed() + 1)
        self.adapters = nn.ModuleList(nn.Linear(40, 40) for _ in range(2))

    def forward(self, x):
        for base, adapter in zip(self.base, self.adapters, strict=True):
            x = base(x.bfloat16()).float() + adapter(x.float())
        return self.again(x.bfloat16()).float()


loss = square_loss(40)


def without_frozen(stage, base_seed=7, **checkpoint):
    config = {"stage": stage, "checkpoint": {"frozen": False, **checkpoint}}
    return start(config, trained_adamw, model=Adapted(base_seed))


def trained_adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def save_without_frozen(folder):
    engine = without_frozen(3)
    train(engine, [0, 1], loss)
    engine.save_checkpoint(folder, blocking=False)
    losses = train(engine, [2, 3], loss)
    engine.close()  # waits for the thread that saves
    return losses


def load_without_frozen(folder):
    results, messages = [], []
    for stage in SOME_STAGES:
        engine = without_frozen(stage)
        train(engine, [9], loss)
        engine.load_checkpoint(folder)
        results.append(train(engine, [2, 3], loss))
        other = without_frozen(stage, base_seed=8)
        messages.append(refused(other, folder))
        saved(folder.with_name("all"), 3, trained_adamw, numbers=(), model=Adapted())
        other.load_checkpoint(folder.with_name("all"), optimizer=False)
    return results, messages


def test_a_checkpoint_without_what_is_frozen_loads_over_the_same_base_alone(ranks, tmp_path):
    expected, _ = ranks(2, save_without_frozen, tmp_path / "run")
    for results, messages in ranks(1, load_without_frozen, tmp_path / "run"):
        for losses in results:
            assert losses == pytest.approx(expected, rel=1e-5)
        for message in messages:
            assert "leaves out the frozen parameter 'base.0." in message
            assert "are others (bfloat16): expected the frozen parameters of" in message
    stored = open_checkpoint(tmp_path / "run" / "step-2.0")
    assert not [name for name in stored.tensors if "base" in name or "again" in name]
    model, recorded = Adapted(), stored.manifest.frozen
    assert recorded.keys() == {name for name, p in model.named_parameters() if not p.requires_grad}
    for name, crc in recorded.items():
        assert crc == zlib.crc32(model.get_parameter(name).detach().view(torch.uint8).numpy().tobytes())


def load_in_another_dtype(folder):
    said = refused(start(2, trained_adamw, model=Adapted().float()), folder)
    assert "present values (float32) are others (bfloat16)" in said


def test_a_base_of_another_dtype_is_another_base(ranks, tmp_path, capsys):
    ranks(1, save_without_frozen, tmp_path / "run")
    ranks(1, load_in_another_dtype, tmp_path / "run")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert re.search(r"left out: +5 frozen parameters", capsys.readouterr().out)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "leaves out 5 frozen parameters, such as" in capsys.readouterr().err
    assert read_manifest(tmp_path / "run" / "step-2.0").frozen
