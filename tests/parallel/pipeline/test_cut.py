"""The cut of a model into chunks, and the schedule, that a config asks for."""

import re
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.parallel.pipeline.runs import plain, start, tokens_of, train
from zeroshard import Config
from zeroshard.assemble import own_part
from zeroshard.parallel.pipeline import cut as cutting
from zeroshard.parallel.pipeline.actions import parse_schedule
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.cut import cut_model
from zeroshard.parallel.pipeline.partition import BlockProfile
from zeroshard.parallel.pipeline.profile import SampleSource, sample_of
from zeroshard.parallel.pipeline.schedules import read_schedule, schedule_of

CPU = torch.device("cpu")
WITH_DATA = SampleSource(TensorDataset(torch.zeros(4, 3), torch.zeros(4, 3)))
OWN = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
"""Two ranks, two micro-batches."""
VEE = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
"""Two chunks a rank, one micro-batch."""


def config_of(schedule="1f1b", pp=2, **pipeline):
    return Config.from_dict({"mesh": {"pp": pp}, "pipeline": {"schedule": schedule, **pipeline}})


def sequence(num_blocks):
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(num_blocks)))


def cut(model, config, source=WITH_DATA):
    read = partial(sample_of, model, source, 1)
    return cut_model(Chunked(model), config.pipeline, config.mesh.pp, CPU, read)


def schedule(config, num_microbatches):
    return schedule_of(read_schedule(config.pipeline), config.mesh.pp, num_microbatches)


def with_times(times):
    """A count that finds given times."""
    blocks = tuple(BlockProfile(time=number, parameter_bytes=1) for number in times)
    return mock.patch.object(cutting, "count_blocks", return_value=blocks)


# ------------------------------------------------------------------------------------------- balance


def test_counted_operations_decide_on_the_cut():
    with with_times((1, 1, 3, 5, 1)):
        found = cut(sequence(5), config_of(pp=3))
    assert found.runs == (range(2), range(2, 3), range(3, 5))
    assert found.is_measured


def test_balance_of_memory_cuts_by_parameters_and_counts_nothing():
    model = nn.Sequential(nn.Linear(9, 30), nn.Linear(30, 2), nn.Linear(2, 2), nn.Linear(2, 40))
    sizes = [9 * 30 + 30, 30 * 2 + 2, 2 * 2 + 2, 2 * 40 + 40]  # 300, 62, 6, 120
    with mock.patch.object(cutting, "count_blocks", side_effect=AssertionError):
        found = cut(model, config_of(balance="memory"))
    assert found.runs == (range(1), range(1, 4))
    assert [block.parameter_bytes for block in found.blocks] == [4 * size for size in sizes]
    assert not found.is_measured


def test_parameters_stand_for_operations_without_data():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 6))  # 6, 6, 6, 18
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cut(model, config_of(), SampleSource())
    assert found.runs == (range(3), range(3, 4))
    assert not found.is_measured


def test_parameters_stand_for_operations_with_a_warning_if_the_model_refuses_the_data():
    text = "pipeline.balance='time': the operations of the blocks could not be counted"
    with pytest.warns(UserWarning, match=text):
        found = cut(nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)), config_of())
    assert found.runs == (range(1), range(1, 2))
    assert not found.is_measured


# ------------------------------------------------------------------------------------------- split


@pytest.mark.parametrize(
    ("split", "schedule", "num_microbatches", "runs"),
    [
        (["3"], "1f1b", 1, (range(3), range(3, 5))),
        (["[2]"], "1f1b", 1, (range(2), range(2, 5))),
        ("1", "1f1b", 1, (range(1), range(1, 5))),
        (["1", "2", "4"], "interleaved", 2, (range(1), range(1, 2), range(2, 4), range(4, 5))),
        (["1", "2", "4"], VEE, 1, (range(1), range(1, 2), range(2, 4), range(4, 5))),
    ],
)
def test_names_begin_new_chunks(split, schedule, num_microbatches, runs):
    config = config_of(schedule, split=split, num_microbatches=num_microbatches)
    with mock.patch.object(cutting, "count_blocks", side_effect=AssertionError):
        assert cut(sequence(5), config).runs == runs


@pytest.mark.parametrize(
    ("split", "schedule", "text"),
    [
        (
            ["layers.3"],
            "1f1b",
            "'layers.3' fits none of '0', '1', '2' and 2 more; expected one",
        ),
        (["[23]"], "1f1b", "'[23]' fits '2', '3' of '0', '1', '2' and 2 more; expected one"),
        (["2", "3"], "1f1b", "expected 1 blocks that begin all but the first of 2 chunks, after '0'"),
        (["0"], "1f1b", "in the order of the model, got 1: 0"),
        (["3", "2", "4"], "interleaved", "got 3: 3, 2, 4"),
        (["2", "2", "4"], "interleaved", "got 3: 2, 2, 4"),
    ],
)
def test_names_that_do_not_fit_are_refused(split, schedule, text):
    with pytest.raises(ValueError, match=f"pipeline.split: .*{re.escape(text)}"):
        cut(sequence(5), config_of(schedule, num_microbatches=2, split=split))


def test_a_part_has_what_patterns_name_in_the_whole_model():
    """In a part alone, the pattern "0.weight" would fit the end of another name."""
    config = Config.from_dict({"mesh": {"pp": 2}, "units": ["*.0", "ReLU"], "ignored": "0.weight"})
    found = []
    for rank in range(2):
        chunked = Chunked(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())))
        made = cut_model(chunked, config.pipeline, 2, CPU, None)
        found.append(own_part(chunked, config, made, rank)[1])
    assert [(one.units, one.ignored) for one in found] == [((), ("0.weight",)), (("1.0", "1.1"), None)]


# ------------------------------------------------------------------------------------------- the user's list


@pytest.mark.parametrize("form", ["text", "path", "name of a file", "schedule"])
def test_a_list_is_read_from_a_text_a_file_or_an_object(form, tmp_path):
    file = tmp_path / "own.csv"
    file.write_text(OWN)
    given = {"text": OWN, "path": file, "name of a file": str(file), "schedule": parse_schedule(OWN)}
    config = config_of(given[form], num_microbatches=2)
    assert Config.from_dict(config.to_dict()) == config
    assert str(schedule(config, 2)) == OWN


@pytest.mark.parametrize(
    "text",
    [
        OWN.replace("B1", "B1,STEP"),
        OWN.replace("0B1", "0B1,0STEP").replace("1B1", "1B1,1STEP"),
        OWN.replace("0B1", "0B1,STEP"),
        re.sub(r"(\d)([FB])(\d)", r"\1UNSHARD\3,\1\2\3,\1RESHARD\3", OWN).replace(
            "RESHARD1\n", "RESHARD1,STEP\n"
        ),
    ],
)
def test_steps_at_the_end_of_each_list_are_that_of_the_batch(text):
    assert str(schedule(config_of(text), 2)) == re.sub(r",\d?STEP", "", text)


def test_the_chunks_of_a_rank_may_have_steps_of_their_own():
    text = VEE.replace("0B0", "0B0,3STEP,0STEP").replace("1B0", "1B0,STEP")
    assert str(schedule(config_of(text), 1)) == VEE


STEPS_LAST = "expected steps after all computations and reduces of the list, got"


@pytest.mark.parametrize(
    ("text", "options", "num_microbatches", "message"),
    [
        (OWN, {"pp": 4}, 2, "mesh.pp: expected 2, as in the lists of pipeline.schedule, got 4"),
        (OWN, {}, 4, "pipeline.num_microbatches: expected 2, as in the lists of pipeline.schedule, got 4"),
        (VEE, {"num_chunks": 3}, 1, "pipeline.num_chunks: expected 2, as in the lists"),
        (
            OWN.replace("0B0", "0B0,STEP"),
            {},
            2,
            f"pipeline rank 0: {STEPS_LAST} STEP before 0B1; a list with",
        ),
        (VEE.replace("3B0", "3B0,3STEP"), {}, 1, f"{STEPS_LAST} 3STEP before 0B0"),
        (OWN.replace("0B1", "0B1,STEP,0REDUCE_GRAD"), {}, 2, "got STEP before 0REDUCE_GRAD"),
        ("0F0,0B0\n1B0,1F0\n", {}, 1, "pipeline.schedule: expected lists that run to their end"),
        ("0F0,0X0\n1F0,1B0\n", {}, 1, "pipeline.schedule: pipeline rank 0: expected an action as"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(text, options, num_microbatches, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        schedule(config_of(text, **options), num_microbatches)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    file = tmp_path / "own.csv"
    with pytest.raises(ValueError, match=f"pipeline.schedule: expected a file of lists, got {file}"):
        read_schedule(config_of(file).pipeline)


# ------------------------------------------------------------------------------------------- over ranks


def trained_on_own_lists(pipeline):
    """Losses by a list of the user's; report, names and evaluation of a cut by times that differ on ranks."""
    engine = start("llama", {"mesh": {"pp": 2}, "pipeline": pipeline})
    losses, _ = train(engine, range(3))
    engine.close(restore=False)
    times = [(1.0, 1.0, 1.0, 5.0), (5.0, 1.0, 1.0, 1.0)][torch.distributed.get_rank()]
    with with_times(times):
        engine = start("llama", {"mesh": {"pp": 2}})
    report, names = engine.pipeline_report(), [name for name, _ in engine.module.named_parameters()]
    loss = engine.eval_batch({"input_ids": tokens_of(0)}, tokens_of(0)).item()
    return losses, report, str(report), names, loss


def test_ranks_train_by_the_lists_and_the_split_of_a_user_and_cut_alike(ranks):
    pipeline = {"schedule": OWN, "num_microbatches": 2, "split": ["model.layers.1"]}
    want, _, _ = plain("llama", range(3))
    found = ranks(2, trained_on_own_lists, pipeline)
    layers = [f"model.layers.{number}" for number in range(4)]
    for losses, report, text, _, loss in found:
        assert losses == pytest.approx(want, rel=1e-6)
        assert loss == pytest.approx(want[0], rel=1e-6)
        assert [chunk.blocks for chunk in report.chunks] == [tuple(layers[:3]), tuple(layers[3:])]
        assert [chunk.time_share for chunk in report.chunks] == [3 / 8, 5 / 8]
        assert [chunk.rank for chunk in report.chunks] == [0, 1]
        assert report.is_measured
        assert re.search(r"chunk 0 +0 +model\.layers\.0 to model\.layers\.2 +37\.5%", text)
        assert re.search(r"chunk 1 +1 +model\.layers\.3 +62\.5%", text)
    assert any("layers.2." in name for name in found[0][3])
    assert not any("layers.2." in name for name in found[1][3])
