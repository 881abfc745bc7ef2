"""The cut of a model into chunks, and the schedule, that a config asks for."""

import re
from fractions import Fraction
from itertools import combinations, pairwise
from statistics import pvariance

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.parallel.pipeline.runs import llama, plain, start, tokens_of, train
from tests.ranks import on_ranks
from zeroshard import Config
from zeroshard.parallel.pipeline.actions import parse_schedule
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.cut import cut_model, partition
from zeroshard.parallel.pipeline.schedules import read_schedule, schedule_of, with_schedule

CPU = torch.device("cpu")
OWN = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
"""Two ranks, two micro-batches."""
VEE = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
"""Two chunks a rank, one micro-batch."""


def config_of(schedule="1f1b", pp=2, **pipeline):
    return Config.from_dict({"mesh": {"pp": pp}, "pipeline": {"schedule": schedule, **pipeline}})


def sequence(num_blocks):
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(num_blocks)))


def cut(model, config):
    return cut_model(Chunked(model), config, CPU)


# ------------------------------------------------------------------------------------------- balance


def test_a_balance_of_time_counts_weights_without_tables_and_one_of_memory_counts_bytes():
    """Modules around the blocks count with the first and the last one."""
    model = llama()
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    table, norm = 40 * 32, 32
    found = cut(model, config_of())
    assert [block.weights for block in found.blocks] == [layer, layer, layer, layer + norm + table]
    sizes = [layer + table, layer, layer, layer + norm + table]
    assert [block.parameter_bytes for block in found.blocks] == [4 * size for size in sizes]
    rows = nn.Sequential(nn.Embedding(9, 30), nn.Linear(30, 2), nn.Linear(2, 2), nn.Linear(2, 40))
    assert cut(rows, config_of()).runs == (range(3), range(3, 4))
    assert cut(rows, config_of(balance="memory")).runs == (range(1), range(1, 4))


def divisions(num_blocks, num_chunks):
    for cuts in combinations(range(1, num_blocks), num_chunks - 1):
        yield tuple(range(first, end) for first, end in pairwise((0, *cuts, num_blocks)))


@given(st.lists(st.integers(0, 4) | st.integers(0, 1 << 40), min_size=1, max_size=7), st.data())
def test_a_search_through_all_divisions_finds_the_same(sizes, data):
    """Of those with the least variance, the one with the fewest blocks in the first chunks."""

    def measure(chunks):
        sums = [Fraction(sum(sizes[block] for block in chunk)) for chunk in chunks]
        return pvariance(sums), [len(chunk) for chunk in chunks]

    num_chunks = data.draw(st.integers(1, len(sizes)))
    assert partition(sizes, num_chunks) == min(divisions(len(sizes), num_chunks), key=measure)


@pytest.mark.parametrize("num_chunks", [0, 4])
def test_an_impossible_partition_is_refused(num_chunks):
    text = f"expected 1 to 3 chunks, as each has a block or more, got {num_chunks}"
    with pytest.raises(ValueError, match=text):
        partition([5] * 3, num_chunks)


# ------------------------------------------------------------------------------------------- split


@pytest.mark.parametrize(
    ("split", "schedule", "num_microbatches", "runs"),
    [
        (["3"], "1f1b", 1, (range(3), range(3, 5))),
        ("1", "1f1b", 1, (range(1), range(1, 5))),
        (["1", "2", "4"], "interleaved", 2, (range(1), range(1, 2), range(2, 4), range(4, 5))),
        (["1", "2", "4"], VEE, 1, (range(1), range(1, 2), range(2, 4), range(4, 5))),
    ],
)
def test_names_begin_new_chunks(split, schedule, num_microbatches, runs):
    config = config_of(schedule, split=split, num_microbatches=num_microbatches)
    assert cut(sequence(5), config).runs == runs


@pytest.mark.parametrize(
    ("split", "schedule", "text"),
    [
        (["layers.3"], "1f1b", "expected 1 blocks that begin all but the first of 2 chunks, after '0'"),
        (["0"], "1f1b", "in the order of the model, got 1: 0"),
        (["2", "3"], "1f1b", "got 2: 2, 3"),
        (["3", "2", "4"], "interleaved", "got 3: 3, 2, 4"),
        (["2", "2", "4"], "interleaved", "got 3: 2, 2, 4"),
    ],
)
def test_names_that_do_not_fit_are_refused(split, schedule, text):
    with pytest.raises(ValueError, match=f"pipeline.split: .*{re.escape(text)}"):
        cut(sequence(5), config_of(schedule, num_microbatches=2, split=split))


# ------------------------------------------------------------------------------------------- the user's list


@pytest.mark.parametrize("form", ["text", "path", "name of a file", "schedule"])
def test_a_list_is_read_from_a_text_a_file_or_an_object(form, tmp_path):
    file = tmp_path / "own.csv"
    file.write_text(OWN)
    given = {"text": OWN, "path": file, "name of a file": str(file), "schedule": parse_schedule(OWN)}
    config = config_of(given[form], num_microbatches=2)
    assert Config.from_dict(config.to_dict()) == config
    assert str(schedule_of(with_schedule(config, read_schedule(config)), 2)) == OWN


@pytest.mark.parametrize(
    "text",
    [
        OWN.replace("B1", "B1,STEP"),
        OWN.replace("0B1", "0B1,0STEP").replace("1B1", "1B1,1STEP"),
        OWN.replace("0B1", "0B1,STEP"),
        re.sub(r"(\d)([FB])(\d)", r"\1UNSHARD\3,\1\2\3,\1RESHARD\3", OWN).replace("1\n", "1,STEP\n"),
    ],
)
def test_steps_at_the_end_of_each_list_are_that_of_the_batch(text):
    schedule = schedule_of(config_of(text), 2)
    assert str(schedule) == re.sub(r",\d?STEP", "", text)


def test_the_chunks_of_a_rank_may_have_steps_of_their_own():
    text = VEE.replace("0B0", "0B0,3STEP,0STEP").replace("1B0", "1B0,STEP")
    assert str(schedule_of(config_of(text), 1)) == VEE


STEPS_LAST = "expected steps after all computations and reduces of the list, got"


@pytest.mark.parametrize(
    ("text", "options", "num_microbatches", "message"),
    [
        (OWN, {"pp": 4}, 2, "mesh.pp: expected 2, as in the lists of pipeline.schedule, got 4"),
        (OWN, {}, 4, "pipeline.num_microbatches: expected 2, as in the lists of pipeline.schedule, got 4"),
        (VEE, {"num_chunks": 3}, 1, "pipeline.num_chunks: expected 2, as in the lists"),
        (OWN.replace("0B0", "0B0,STEP"), {}, 2, f"rank 0: {STEPS_LAST} STEP before 0B1; a list with"),
        (VEE.replace("3B0", "3B0,3STEP"), {}, 1, f"{STEPS_LAST} 3STEP before 0B0"),
        (OWN.replace("0B1", "0B1,STEP,0REDUCE_GRAD"), {}, 2, "got STEP before 0REDUCE_GRAD"),
        ("0F0,0B0\n1B0,1F0\n", {}, 1, "pipeline.schedule: expected lists that run to their end"),
        ("0F0,0X0\n1F0,1B0\n", {}, 1, "pipeline.schedule: pipeline rank 0: expected an action as"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(text, options, num_microbatches, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        schedule_of(config_of(text, **options), num_microbatches)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    file = tmp_path / "own.csv"
    with pytest.raises(ValueError, match=f"pipeline.schedule: expected a file of lists, got {file}"):
        read_schedule(config_of(file))


# ------------------------------------------------------------------------------------------- over ranks


@on_ranks(2)
def test_ranks_train_by_the_lists_and_the_split_of_a_user():
    pipeline = {"schedule": OWN, "num_microbatches": 2, "split": ["model.layers.3"]}
    engine, (want, *_) = start("llama", {"mesh": {"pp": 2}, "pipeline": pipeline}), plain("llama", range(4))
    losses, _ = train(engine, range(3))
    losses.append(engine.eval_batch({"input_ids": tokens_of(3)}, tokens_of(3)).item())
    assert losses == pytest.approx(want, rel=1e-6)
    layers = tuple(f"model.layers.{number}" for number in range(4))
    layer, last = 3 * 32 * 48 + 2 * 32 * 32 + 2 * 32 * 16 + 2 * 32, 32 + 40 * 32
    share, chunks = (layer + last) / (4 * layer + last), engine.pipeline_report().chunks
    assert [chunk.blocks for chunk in chunks] == [layers[:3], layers[3:]]
    assert [chunk.time_share for chunk in chunks] == pytest.approx([1 - share, share])
    assert [chunk.rank for chunk in chunks] == [0, 1]
    text = rf"chunk 1 +1 +model\.layers\.3 +{share:.1%}"
    assert re.search(text, str(engine.pipeline_report()))
    is_there = any("layers.2." in name for name, _ in engine.module.named_parameters())
    assert is_there == (torch.distributed.get_rank() == 0)
    engine.close(restore=False)


@on_ranks(4)
def test_verbs_of_the_sharding_anywhere_in_a_list_change_no_bit():
    found = []
    for text in (OWN, OWN.replace("0F0", "0RESHARD,0F0,0UNSHARD").replace("1B1", "1REDUCE_GRAD,1B1")):
        pipeline = {"schedule": text, "num_microbatches": 2}
        engine = start("llama", {"stage": 3, "mesh": {"pp": 2}, "pipeline": pipeline})
        found.append(train(engine, range(2)))
        engine.close(restore=False)
    assert found[0] == found[1]
