"""What does not fit is refused at the start, by kind, with what needs less, before anything is allocated."""

from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.checkpoint import runs
from tests.ranks import on_ranks
from zeroshard.memory import budget
from zeroshard.memory.budget import check_budget, host_bytes_free, limits_of_groups
from zeroshard.optim import AdamW8bit

GIB = 1 << 30
NEEDED = {"optimizer states": 8 * GIB, "main parameters": 2 * GIB}


def test_what_fits_to_the_byte_is_no_shortage_and_a_shortage_is_told_by_kind(monkeypatch):
    monkeypatch.setattr(budget, "host_bytes_free", lambda: 20 * GIB)
    check_budget(NEEDED, 2)
    check_budget({}, 2)
    monkeypatch.setattr(budget, "host_bytes_free", lambda: 20 * GIB - 1)
    with pytest.raises(RuntimeError) as caught:
        check_budget(NEEDED, 2)
    *lines, remedy = str(caught.value).splitlines()
    assert lines == [
        "Expected 20.00 GiB of host memory on this node, got 20.00 GiB free:",
        "  optimizer states: 8.00 GiB on each of 2 rank(s)",
        "  main parameters: 2.00 GiB on each of 2 rank(s)",
    ]
    assert 'offload.optimizer="nvme"' in remedy


def test_the_check_reads_this_node():
    check_budget({"optimizer states": 1}, 2)
    with pytest.raises(RuntimeError, match=r"Expected \d+.* of host memory.* got .* free"):
        check_budget({"optimizer states": 1 << 60}, 2)
    assert 0 < host_bytes_free() <= psutil.virtual_memory().total


def test_limits_of_control_groups_of_version_2(tmp_path):
    contents = {
        "job": ("1000\n", "900\n", "anon 1\ninactive_file 50"),
        "job/rank": ("max\n", "7\n", "inactive_file 3\n"),
    }
    for folder, texts in contents.items():
        (tmp_path / folder).mkdir()
        for name, text in zip(("max", "current", "stat"), texts, strict=True):
            (tmp_path / folder / f"memory.{name}").write_text(text)
    assert list(limits_of_groups("0::/job/rank\n", tmp_path)) == [150]
    assert list(limits_of_groups("0::/elsewhere\n", tmp_path)) == []


# -------------------------------------------------------------------------------- the check of a job

MAKERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "8-bit": lambda model: AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256),
}


def refusals(folder):
    """The messages on a node without memory, by optimizer."""
    config = {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": str(folder)}}
    messages = {}
    for name, make in MAKERS.items():
        with (
            mock.patch.object(budget, "host_bytes_free", return_value=1000),
            pytest.raises(RuntimeError, match=r".") as caught,
        ):
            runs.start(config, make)
        messages[name] = str(caught.value)
    return messages


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_needed_what_there_is_and_what_needs_less_are_told_on_all_ranks(ranks, tmp_path, num_ranks):
    for messages in ranks(num_ranks, refusals, tmp_path):
        for message in messages.values():
            assert "of host memory on this node, got 1000 B free" in message
            assert "buffers for the units in files: " in message
            assert f"on each of {num_ranks} rank(s)" in message
            assert 'precision.main_dtype="bf16"' in message
        assert not list(tmp_path.rglob("*.swap"))


@on_ranks(2)
def test_a_folder_that_one_rank_does_not_see_is_an_error_of_all(tmp_path):
    config = {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    lost = ValueError("the folder is gone") if dist.get_rank() else None
    with (
        mock.patch.object(budget, "check_folder", side_effect=lost),
        pytest.raises(ValueError, match=r"the folder is gone \(rank 1\)"),
    ):
        runs.start(config, MAKERS["AdamW"])
