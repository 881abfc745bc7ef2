"""The code in docs/migrating.md runs, and does what is written there."""

import contextlib
import copy
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import zeroshard
from tests.migrating import SECTIONS, TEXT, blocks
from tests.ranks import on_ranks
from zeroshard import Config

FROM_DDP, FROM_DEEPSPEED, FROM_FSDP2 = (
    SECTIONS[name] for name in ("DistributedDataParallel", "DeepSpeed", "FSDP2")
)
(DS_CONFIG,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def run(block, rank, **names):
    """Execute a block on the model and the data that it speaks of; give back its names."""
    torch.manual_seed(0)
    dataset = [(torch.randn(16), torch.tensor(number % 3)) for number in range(16)]
    loader = [
        (torch.stack([dataset[i][0] for i in batch]), torch.stack([dataset[i][1] for i in batch]))
        for batch in torch.arange(16).view(4, 4)[:, 2 * rank : 2 * rank + 2].tolist()
    ]
    names |= {"model": Net(), "dataset": dataset, "loader": loader, "torch": torch, "F": F, "math": math}
    exec(block, names)
    return names


@on_ranks(2, process_group=False)
def test_what_a_ddp_script_becomes_trains_the_same(tmp_path):
    """The mean on held-out data, and the file that rank 0 writes."""
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(1)
    library = {"held_out": [(torch.randn(16, generator=generator), torch.tensor(i % 3)) for i in range(8)]}
    library |= {"zeroshard": zeroshard, "contextlib": contextlib, "build_model": Net, "dist": dist}
    library |= {kind.__name__: kind for kind in (DataLoader, DistributedDataParallel, DistributedSampler)}
    ended = []
    for first_line in ("DDP", "zeroshard"):
        (script,) = blocks(FROM_DDP, first_line)
        (tmp_path / first_line).mkdir(exist_ok=True)
        with contextlib.chdir(tmp_path / first_line):
            ended.append(run(script, rank, **library))
    (alone,) = blocks(FROM_DDP, "zeroshard: one rank evaluates")
    exec(alone, names := dict(ended[1]))
    if rank:
        return
    ddp, ours, again = (each["mean"].item() for each in (*ended, names))
    assert [ours, again] == pytest.approx([ddp] * 2, abs=1e-6)
    expected, saved = (torch.load(tmp_path / name / "model.pt") for name in ("DDP", "zeroshard"))
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-6)
        assert not torch.equal(value, run("", 0)["model"].state_dict()[name])


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_evaluation_on_rank_0_alone_works_up_to_stage_2_and_is_an_error_at_stage_3(stage):
    names = run("", int(os.environ["RANK"]))
    optimizer = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    config = {"stage": stage, "watchdog_s": 0.4 if stage == 3 else 60}
    engine = zeroshard.initialize(names["model"], optimizer, config).engine
    inputs, targets = names["loader"][0]
    refused = pytest.raises(RuntimeError, match=r"every forward \(in evaluation too\)")
    with refused if stage == 3 else contextlib.nullcontext():
        for _ in range(2):
            if dist.get_rank() == 0:
                with torch.no_grad():
                    engine(inputs)
            F.cross_entropy(engine(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_what_an_fsdp2_script_becomes_trains_the_same():
    rank = int(os.environ["RANK"])
    library = {"zeroshard": zeroshard, "contextlib": contextlib}
    used = (fully_shard, MixedPrecisionPolicy, StateDictOptions, get_model_state_dict)
    library |= {one.__name__: one for one in used}
    (theirs,), (ours,) = (blocks(FROM_FSDP2, first_line) for first_line in ("FSDP2", "zeroshard"))
    fsdp2 = run(theirs, rank, **library)
    expected = copy.deepcopy(fsdp2["state_dict"])
    names = run(ours, rank, **library)
    if rank:
        return
    initial = run("", 0)["model"].state_dict()
    assert names["loss"].item() == pytest.approx(fsdp2["loss"].item(), rel=1e-2)
    assert names["state_dict"].keys() == expected.keys()
    for name, value in expected.items():
        assert not torch.equal(value, initial[name])
        torch.testing.assert_close(names["state_dict"][name], value, rtol=0, atol=1e-3)


@on_ranks(2)
def test_what_a_deepspeed_script_becomes_takes_its_steps(tmp_path):
    rank = int(os.environ["RANK"])
    file = tmp_path / f"{rank}.json"
    file.write_text(DS_CONFIG)
    (script,) = blocks(FROM_DEEPSPEED, "zeroshard")
    told = r"DeepSpeed config(.|\n)*optimizer, scheduler \(initialize takes objects of torch"
    with pytest.warns(UserWarning, match=told) if rank == 0 else contextlib.nullcontext():
        names = run(script.replace('"ds_config.json"', repr(str(file))), rank, zeroshard=zeroshard)
    assert names["engine"].global_step == 2  # 16 samples, 2 ranks, 2 in a micro-batch, 2 of these in a step
    assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(1e-3 / 100)


FALLING = [0.0001 + 0.9999 * (1 + math.cos(math.pi * part)) / 2 for part in (0.25, 0.5, 0.75, 1.0, 1.0)]


def test_a_factor_of_the_table_of_schedules_is_the_one_of_deepspeed():
    (rise,) = re.findall(r"or `(.*?)` with `\"warmup_type\": \"linear\"`", FROM_DEEPSPEED)
    names, begin = {"W": 4, "T": 8, "math": math}, [0.0, 0.0, 0.25, 0.5, 0.75]
    for kind, end in (
        ("WarmupLR", [1.0, 1.0]),
        ("WarmupDecayLR", [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("WarmupCosineLR", FALLING),
    ):
        (factor,) = re.findall(rf"^\| `{kind}` \| `(.*)` \|$", FROM_DEEPSPEED, re.MULTILINE)
        for step, expected in enumerate(begin + end):
            now = names | {"step": step}
            assert eval(factor, now | {"rise": eval(rise, now)}) == pytest.approx(expected)


ROWS = re.findall(r'^\| `("\w+": .*)` \| `(.*)` \|$', FROM_DEEPSPEED, re.MULTILINE)


@pytest.mark.parametrize(("theirs", "ours"), ROWS)
@pytest.mark.filterwarnings("ignore:DeepSpeed config")
def test_a_row_of_the_key_table_is_true(theirs, ours):
    assert len(ROWS) == TEXT.count('\n| `"')
    expected = eval(f"dict({ours})", {name: getattr(zeroshard, name) for name in zeroshard.__all__})
    assert Config.from_deepspeed(json.loads(f"{{{theirs}}}")) == Config(**{"stage": 0} | expected)


def test_the_options_that_replace_something_of_fsdp2_exist():
    found = re.findall(r"`((?:units|num_prefetch|shard_group_size|offload)=[^`]*)`", FROM_FSDP2)
    assert found
    for options in found:
        Config(**eval(f"dict({options})", {"Offload": zeroshard.Offload}))


@on_ranks(1)
def test_what_is_called_on_the_engine_exists():
    rows = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("| `")]
    ours = " ".join(row[1] for row in rows if len(row) == 2)
    names = set(re.findall(r"engine\.(\w+)", ours))
    assert {"full_state_dict", "unsharded", "clip_grad_norm_"} < names
    engine = zeroshard.initialize(Net(), torch.optim.SGD).engine
    assert [name for name in names if not hasattr(engine, name)] == []


def three_losses(model, optimizer, rank):
    """Losses of three steps, each followed by an optimizer step."""
    losses = []
    for inputs, targets in run("", rank)["loader"][:3]:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("section", "first_line", "client_state"),
    [
        ("DeepSpeed", "zeroshard: checkpoints", {"epoch": 5}),
        pytest.param("FSDP2", "FSDP2 with DCP", None, marks=pytest.mark.long),
        ("FSDP2", "zeroshard with checkpoints", None),
    ],
)
@on_ranks(2)
def test_code_about_checkpoints_goes_on_where_it_saved(tmp_path, section, first_line, client_state):
    rank = int(os.environ["RANK"])
    model = run("", rank)["model"]
    is_fsdp2 = first_line.startswith("FSDP2")
    if is_fsdp2:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names = {"model": model, "optimizer": optimizer, "step": 3, "epoch": 5, "Path": Path, "dcp": dcp}
    names |= {"get_state_dict": get_state_dict, "set_state_dict": set_state_dict}
    if not is_fsdp2:
        names["engine"] = model = zeroshard.initialize(model, optimizer).engine
    three_losses(model, optimizer, rank)
    (block,) = blocks(SECTIONS[section], re.escape(first_line))
    save, load = block.split("\n\n")
    with contextlib.chdir(tmp_path):
        exec(save, names)
        went_on = three_losses(model, optimizer, rank)
        exec(load, names)
    assert three_losses(model, optimizer, rank) == went_on
    assert names.get("client_state") == client_state
