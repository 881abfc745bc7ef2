"""What does not fit is refused at the start, by kind, with what needs less."""

from pathlib import Path

import psutil
import pytest

from zeroshard.tiers.budget import (
    Node,
    check_budget,
    describe_shortage,
    host_bytes_free,
    limits_of_groups,
)

GIB = 1 << 30
NEEDED = {"optimizer states": 8 * GIB, "main parameters": 2 * GIB}


def test_what_fits_to_the_byte_is_no_shortage():
    node = Node(20 * GIB, {("/a", "/b"): 6 * GIB})
    assert describe_shortage(NEEDED, 3 * GIB, 2, node) == ""
    assert describe_shortage(NEEDED, 3 * GIB, 2, node._replace(host=20 * GIB - 1)) != ""
    assert describe_shortage(NEEDED, 3 * GIB, 2, node._replace(disks={("/a", "/b"): 6 * GIB - 1})) != ""
    assert describe_shortage({}, 0, 2, Node(0, {})) == ""


def test_a_shortage_of_memory_is_told_by_kind_with_what_needs_less():
    *lines, remedy = describe_shortage(NEEDED, 0, 2, Node(11 * GIB, {})).splitlines()
    assert lines == [
        "Expected 20.00 GiB of host memory on this node, got 11.00 GiB free:",
        "  optimizer states: 8.00 GiB on each of 2 rank(s)",
        "  main parameters: 2.00 GiB on each of 2 rank(s)",
    ]
    assert 'offload.optimizer="nvme"' in remedy


def test_each_disk_has_the_share_of_its_folders():
    node = Node(100 * GIB, {("/a", "/b"): 8 * GIB, ("/c",): 3 * GIB})
    line, _ = describe_shortage({}, 6 * GIB, 2, node).splitlines()
    assert line == (  # 4 GiB in each of 3 folders
        "offload.nvme_path: expected 4.00 GiB on the disk of /c for 2 rank(s), got 3.00 GiB free"
    )


def test_the_check_reads_this_node(tmp_path):
    check_budget({"optimizer states": 1}, 4096, [tmp_path, str(tmp_path)], 2)
    with pytest.raises(RuntimeError, match=r"Expected \d+.* of host memory(.|\n)*/.* got .* free"):
        check_budget({"optimizer states": 1 << 60}, 1 << 60, [tmp_path], 2)
    with pytest.raises(ValueError, match=r"nvme_path: expected .* '/proc/self': its file system has no room"):
        check_budget({}, nvme=1, folders=["/proc/self"], num_ranks_on_node=1)
    with pytest.raises(ValueError, match=r"nvme_path: expected an existing folder .* does not exist"):
        check_budget({}, 1, [tmp_path / "missing"], 1)
    assert 0 < host_bytes_free() <= psutil.virtual_memory().total


def write(folder, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_limits_of_control_groups_of_version_2(tmp_path):
    write(
        tmp_path / "job",
        memory__max="1000\n",
        memory__current="900\n",
        memory__stat="anon 1\ninactive_file 50",
    )
    write(tmp_path / "job/rank", memory__max="max\n", memory__current="7\n", memory__stat="inactive_file 3\n")
    assert list(limits_of_groups("0::/job/rank\n", tmp_path)) == [150]
    assert list(limits_of_groups("0::/elsewhere\n", tmp_path)) == []


def test_limits_of_control_groups_of_version_1(tmp_path):
    root = {"memory__limit_in_bytes": "500", "memory__usage_in_bytes": "90", "memory__stat": "cache 9"}
    write(tmp_path / "memory", **root)
    groups = "9:name=systemd:/\n4:cpu,memory:/a/path:of/the/host\n0::/\n"
    assert list(limits_of_groups(groups, tmp_path)) == [410]


def test_a_limit_of_a_group_is_less_than_the_memory_of_the_node(monkeypatch):
    monkeypatch.setattr("zeroshard.tiers.budget.limits_of_groups", lambda groups, root: iter([4096, 12345]))
    assert Path("/proc/self/cgroup").exists()
    assert host_bytes_free() == 4096
