"""Values in files: saved, loaded on any tier, built there, given back."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard
from tests.checkpoint import runs
from tests.distributed.training import numbers
from tests.stores.test_offload import BF16_MAIN, CHOSEN_STAGES, FILES, OPTIMIZERS, offload
from zeroshard.checkpoint import files

BEFORE, AFTER = range(3), range(3, 6)
LONG = [("AdamW", 1), ("AdamW", 2), ("8-bit", 1), ("8-bit", 3), ("8-bit", 4)]
"""Optimizers and numbers of ranks."""


def layouts(folder):
    """Configs of several stages and tiers, by name."""
    return {
        "device, stage 1": {"stage": 1},
        "files, stage 0": {"stage": 0, **offload(folder)},
        "files, stage 2": {"stage": 2, **offload(folder, device_fraction=0.3)},
        "files, stage 3": {"stage": 3, **offload(folder, **FILES)},
    }


def save(folder, make):
    """The state of a run on each layout, which is saved under the name of the layout; in the background."""
    found = {}
    for name, config in layouts(folder).items():
        engine = runs.start(config, OPTIMIZERS[make])
        runs.train(engine, BEFORE)
        engine.save_checkpoint(folder / "saved", name, blocking=False)
        engine._saver.finish()
        found[name] = runs.state(engine)
    return found


def load(folder, make):
    """By layouts of the checkpoint and of the run: the state that was loaded, and states in memory.

    All pairs of them, or in a short run each checkpoint at the next layout.
    """
    found = {}
    for number, (name, config) in enumerate(layouts(folder).items()):
        for before, saved in enumerate(layouts(folder)):
            if saved.endswith("2") and name.endswith("2"):
                continue
            if len(CHOSEN_STAGES) == 1 and (before + 1) % len(layouts(folder)) != number:
                continue
            engine = runs.start(config, OPTIMIZERS[make], seed=1)
            engine.load_checkpoint(folder / "saved", saved)
            memory = engine._runtime.context.memory
            tiers = {p: b.plan.state_tier for b in engine._runtime.buffers for p in b.sharded}
            outside = [
                f"{p.fqn}/{key}"
                for p, values in engine.optimizer.state.items()
                for key, value in values.items()
                if isinstance(value, torch.Tensor) and value.dim() and value.numel()
                if memory.tier_of(value) is not tiers[p]
            ]
            loaded = runs.state(engine)
            losses = runs.train(engine, AFTER)
            found[saved, name] = (loaded, runs.state(engine, losses), outside)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "num_ranks"), [("AdamW", 3), *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_what_one_tier_saved_goes_on_in_another(ranks, tmp_path, make, num_ranks):
    states = ranks(2, save, tmp_path, make, timeout=120)[0]
    stop = states["device, stage 1"]
    for name, state in states.items():
        assert not runs.differences(state, stop), name
    ends = []
    for name, (loaded, end, outside) in ranks(num_ranks, load, tmp_path, make, timeout=300)[0].items():
        assert not outside, name
        assert not runs.differences(loaded, stop), name
        ends.append((name, end))
    for name, end in ends[1:]:
        assert not runs.differences(end, ends[0][1]), name


def convert(folder):
    """States of 32 bits become ones of 8 bits and back: in files and on the device."""
    found = []
    for first, second in (("AdamW", "8-bit"), ("8-bit", "AdamW")):
        ends = []
        for config in ({"stage": 3}, {"stage": 3, **offload(folder, **FILES)}):
            engine = runs.start(config, lambda model, first=first: plain(first, model))
            runs.train(engine, BEFORE)
            engine.save_checkpoint(folder / "saved", "one")
            engine = runs.start(config, lambda model, second=second: plain(second, model), seed=1)
            engine.load_checkpoint(folder / "saved", convert_states=True)
            ends.append(runs.state(engine, runs.train(engine, AFTER)))
        found += runs.differences(*ends)
        assert ends[0].losses == ends[1].losses
    return found


def plain(name, model):
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zeroshard.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256)


def test_states_in_files_get_another_number_of_bits(ranks, tmp_path):
    for found in ranks(2, convert, tmp_path):
        assert not found


# ------------------------------------------------------------------------------------------------- building


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def language_loss(model, step):
    tokens = runs.batch(step) % SIZES["vocab_size"]
    return model(input_ids=tokens, labels=tokens).loss


def built(folder, config):
    """Models that are built in the tier: all that one can do with them, at its end given back."""
    found = {}
    for name, how in {"pretrained": load_pretrained, "deferred": build_deferred}.items():
        model = how(folder, config)
        engine = zeroshard.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config).engine
        losses = runs.train(engine, range(2), language_loss)
        generated = engine.generate(
            input_ids=torch.arange(6).view(2, 3), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        losses += runs.train(engine, range(2, 3), language_loss)
        engine.save_pretrained(folder / f"exported-{name}")
        engine.close()
        whole = {key: value.clone() for key, value in model.state_dict().items()}
        found[name] = (losses, generated, whole, language_loss(model, 9).item())
        del engine
    return found


def load_pretrained(folder, config):
    return zeroshard.from_pretrained(LlamaForCausalLM, folder / "model", config)


def build_deferred(_, __):
    torch.manual_seed(0)
    with zeroshard.deferred_init():
        return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_models_are_built_in_files_generate_and_are_given_back(ranks, tmp_path, num_ranks):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    for precision in ({}, BF16_MAIN):
        want = ranks(num_ranks, built, tmp_path, {"stage": 3, **precision})
        exported = (tmp_path / "exported-deferred" / "model.safetensors").read_bytes()
        got = ranks(num_ranks, built, tmp_path, {"stage": 3, **precision, **offload(tmp_path, **FILES)})
        assert (tmp_path / "exported-deferred" / "model.safetensors").read_bytes() == exported
        for one, other in zip(got, want, strict=True):
            for name, (losses, generated, whole, loss) in one.items():
                assert losses == other[name][0]
                assert torch.equal(generated, other[name][1])
                assert loss == other[name][3]
                assert all(torch.equal(value, other[name][2][key]) for key, value in whole.items())


class Adapted(nn.Module):
    """A frozen base in bfloat16 with trained layers of low rank beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class AdaptedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(7, 7, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, x):
        return x + self.base(x.bfloat16()).float() + self.up(self.down(x))


def adapt(folder):
    """Where a run with the base in files differs; the bytes of the files."""
    ends, sizes = [], []
    for tier in ({}, offload(folder, optimizer="none", **FILES), offload(folder, **FILES)):
        config = {"stage": 3, "checkpoint": {"frozen": False}, **tier}
        engine = runs.start(config, OPTIMIZERS["AdamW"], model=Adapted())
        losses = runs.train(engine, BEFORE, lambda m, n: m(numbers(n, 5, 7)).square().mean())
        engine.save_checkpoint(folder / "saved", str(len(ends)))
        engine.load_checkpoint(folder / "saved", "0")
        ends.append(runs.state(engine, losses))
        memory = engine._runtime.context.memory
        sizes.append(sum(memory.is_in_files(p.detach()) for p in engine.parameters() if not p.requires_grad))
    found = [text for end in ends[1:] for text in runs.differences(end, ends[0])]
    return found, [end.losses == ends[0].losses for end in ends], sizes


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_frozen_base_lies_in_files(ranks, tmp_path, num_ranks):
    for found, are_equal, (none, *others) in ranks(num_ranks, adapt, tmp_path):
        assert not found
        assert all(are_equal)
        assert none == 0
        assert min(others) > 0


class Partly(nn.Module):
    """A model with a parameter that each rank keeps for itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        x = self.own(x)
        for block in self.blocks:
            x = block(x)
        return x


def leave_out(folder):
    ends = []
    for tier in ({}, offload(folder)):
        model = Partly()
        config = {"stage": 3, "ignored": ["own.*"], **tier}
        engine = runs.start(config, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), model=model)
        losses = runs.train(engine, BEFORE, lambda m, n: m(numbers(n, 5, 7)).square().mean())
        ends.append(
            (losses, {k: v.clone() for k, v in engine.full_state_dict().items()}, type(model.own.weight))
        )
    (losses, one, kind), (others, other, its) = ends
    return losses == others, [k for k in one if not torch.equal(one[k], other[k])], kind is its


def test_ignored_parameters_are_stepped_beside_those_in_files(ranks, tmp_path):
    for found in ranks(2, leave_out, tmp_path):
        assert found == (True, [], True)


# ------------------------------------------------------------------------------------------------ no copies


def save_in_background(folder):
    engine = runs.start({"stage": 3, **offload(folder)}, OPTIMIZERS["AdamW"])
    runs.train(engine, range(1))
    engine.save_checkpoint(folder / "saved", "one", blocking=False)
    return files.find(folder / "saved").is_dir(), engine._saver._thread is None, engine._saver._copies._buffer


def test_a_save_of_values_in_files_copies_nothing_into_memory(ranks, tmp_path):
    for found in ranks(2, save_in_background, tmp_path):
        assert found == (True, True, None)


# ---------------------------------------------------------------------------------------------------- files


def swap_files(folder):
    return sorted(str(path) for path in Path(folder).rglob("*.swap"))


def two_engines(folder):
    """The files beside two engines, one closed, one dropped; and whether the second one went on."""
    config = {"stage": 3, **offload(folder)}
    first, second = (runs.start(config, OPTIMIZERS["AdamW"]) for _ in range(2))
    losses = [runs.train(engine, range(2)) for engine in (first, second)]
    runs.from_all(None)
    numbers_of_files = [len(swap_files(folder))]
    first.close()
    del first
    gc.collect()
    runs.from_all(None)
    numbers_of_files.append(len(swap_files(folder)))
    losses.append(runs.train(second, range(2, 4)))
    del second
    gc.collect()
    runs.from_all(None)
    end = time.monotonic() + 20
    while (num := len(swap_files(folder))) and time.monotonic() < end:
        time.sleep(0.01)  # a read ahead of the next step may be under way
    return [*numbers_of_files, num], losses[0] == losses[1]


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_files_of_an_engine_go_with_it(ranks, tmp_path, num_ranks):
    for num_files, is_equal in ranks(num_ranks, two_engines, tmp_path):
        assert num_files == [2 * num_ranks, num_ranks, 0]
        assert is_equal
