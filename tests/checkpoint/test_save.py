"""Files of a save, at once and in the background; tags and what becomes of older checkpoints."""

import contextlib
import json
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoint.runs import differences, saved, snapshot_of, start, state, train
from tests.endings import Forks, run  # noqa: F401 (a fixture)
from tests.ranks import on_ranks
from zeroshard.checkpoint import save as saving
from zeroshard.checkpoint.files import find
from zeroshard.checkpoint.save import Saver
from zeroshard.checkpoint.tensors import TensorSlice


def contents(folder, tag=None):
    """The bytes of every file of a checkpoint."""
    return {path.name: path.read_bytes() for path in sorted(find(folder, tag).iterdir())}


# ------------------------------------------------------------------------------------------------- bytes


def several_ways(folder):
    engine = saved(folder, tag="a", client_state={"v": 1})
    engine.save_checkpoint(folder, "b", {"v": 1})
    engine.save_checkpoint(folder, "c", {"v": 1}, blocking=False)
    engine.save_checkpoint(folder, "d", {"v": 1}, blocking=False)
    engine.load_checkpoint(folder, "d")
    engine.save_checkpoint(folder, "e", {"v": 1})


def test_the_same_state_is_the_same_bytes_however_it_is_saved_and_tells_who_wrote_what(ranks, tmp_path):
    ranks(2, several_ways, tmp_path)
    first = contents(tmp_path, "a")
    assert {
        "__0_0.distcp",
        "__1_0.distcp",
        ".metadata",
        "values.json",
        "values.safetensors",
        "zeroshard.json",
    } == first.keys()
    for tag in "bcde":
        other = contents(tmp_path, tag)
        assert other.keys() == first.keys()
        for name, data in first.items():
            assert other[name] == data, (tag, name)
    check_manifest(tmp_path)


# -------------------------------------------------------------------------------------------- background


@on_ranks(2)
def test_a_save_in_the_background_holds_the_values_of_the_call(tmp_path):
    """Two saves in the background that write after further steps: state at each call, and as written."""
    engine, found, write_part = start(3), [], saving.write_part
    have_trained = [threading.Event() for _ in range(2)]
    awaited = iter(have_trained)  # one for each save: a thread may come late to its wait

    def write_later(*args):
        assert next(awaited).wait(55)
        return write_part(*args)

    with mock.patch.object(saving, "write_part", write_later):
        for number in range(2):
            train(engine, [number])
            engine.save_checkpoint(tmp_path, f"at-{number}", {"n": number}, blocking=False)
            found.append(state(engine))
            train(engine, range(2, 2 + number))
            have_trained[number].set()
        engine.close()  # waits for the last save: another engine cannot
    for number, want in enumerate(found):
        other = start(number, seed=1)
        assert other.load_checkpoint(tmp_path, None if number else "at-0") == {"n": number}
        found[number] = differences(state(other), want)
    assert found == [[], []]


@pytest.mark.gpu
def test_on_a_gpu_copies_are_pinned_and_have_the_values_of_the_moment():
    values = torch.ones(5 << 20, device="cuda"), torch.arange(3, device="cuda"), torch.ones(5 << 20).double()
    parts = [TensorSlice("a", value.shape, 0, value.cuda()) for value in values]
    before = [part.data.cpu() for part in parts]
    saver, snapshot = Saver(None), snapshot_of(None, parts, torch.device("cuda"))
    saver.copied(snapshot).wait()  # to pin memory, the driver waits for the device
    torch.cuda._sleep(2_000_000_000)  # cycles, a second; the copies are queued behind it
    slow = torch.cuda.current_stream().record_event()
    copied = saver.copied(snapshot)
    for part in parts:
        part.data.zero_()  # queued behind the copies
    assert not slow.query()  # the host did not wait
    copied.wait()
    assert all(part.data.is_pinned() for part in copied.slices)
    assert all(torch.equal(part.data, value) for part, value in zip(copied.slices, before, strict=True))


SCRIPT = """
from tests.checkpoint.runs import start, train
engine = start(3)
train(engine, range(2))
engine.save_checkpoint({0!r}, "now")
engine.save_checkpoint({0!r}, "later", blocking=False)
"""


@pytest.mark.long
def test_a_process_that_ends_after_a_save_in_the_background_leaves_a_checkpoint(run: Forks, tmp_path):  # noqa: F811
    folders = [tmp_path / end for end in ("ends", "destroys")]
    ends, destroys = (SCRIPT.format(str(folder)) for folder in folders)
    for endings in run(ends, f"{destroys}\nimport torch\ntorch.distributed.destroy_process_group()"):
        assert [ending.code for ending in endings] == [0, 0], endings
    for folder in folders:
        assert contents(folder) == contents(folder, "later") == contents(folder, "now")


# -------------------------------------------------------------------------------------------------- tags


NO_PATHS = ("", "  ", None, b"folder", 3, "a\0b")


def save_without_a_path(folder):
    engine, found = start(3), []
    with contextlib.chdir(folder):
        for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_pretrained):
            for path in NO_PATHS:
                with pytest.raises(ValueError, match="dir: expected a path") as caught:
                    call(path)
                found += [] if repr(path) in str(caught.value) else [str(caught.value)]
        with pytest.raises(ValueError, match=r"dir: expected a path .* got None"):
            engine.save_checkpoint(None if dist.get_rank() else folder)
        engine.save_checkpoint("here")
        engine.load_checkpoint("here")
        engine.save_pretrained(None if dist.get_rank() else "there")  # it is rank 0's
    return found


def test_what_is_no_path_is_refused_on_all_ranks_and_nothing_is_written(ranks, tmp_path):
    assert ranks(2, save_without_a_path, tmp_path) == [[], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]


@on_ranks(2)
def test_the_newest_checkpoints_are_kept(tmp_path):
    engine = start({"stage": 3, "checkpoint": {"keep_last": 2}}, model=nn.Linear(3, 2))
    for tag in ("a", "b", "c", "a", "d"):
        engine.save_checkpoint(tmp_path, tag, {"tag": tag}, blocking=False)
    assert engine.load_checkpoint(tmp_path) == {"tag": "d"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.0", "d", "d.0", "latest"]


def check_manifest(tmp_path):
    content = json.loads(contents(tmp_path, "a")["zeroshard.json"])["content"]
    assert content["written_by"]["num_ranks"] == 2
    assert content["written_by"]["torch"] == torch.__version__
    assert content["config"]["stage"] == 3
    assert content["model"]["class"] == "Net"
    assert (content["optimizer"], content["global_step"]) == ("AdamW", 2)
    assert content["parameters"]["tokens.weight"]["aliases"] == ["head.weight"]
    assert content["parameters"]["empty"]["shape"] == [0, 5]
