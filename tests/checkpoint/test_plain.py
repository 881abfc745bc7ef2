"""Values that load without running code, and the key of one that would not."""

import collections
import pathlib
import pickle

import pytest
import torch
from torch import nn

from zeroshard.checkpoint.plain import check_plain, read, to_bytes


def check_same(got, want):
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key, value in want.items():
            check_same(got[key], value)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            check_same(one, other)
    else:
        assert got == want


PLAIN = {
    "numbers": [1, -(2**80), 0.1, 1e-300, True, None],
    "text": ("", "naïve ✓", b"bytes"),
    7: {"nested": {"deeper": [{(1, 2): {3}}]}},
    "tensors": [torch.arange(3), torch.ones(2, 0), torch.tensor(2.5, dtype=torch.bfloat16)],
    "infinite": float("inf"),
    "ordered": collections.OrderedDict(a=1),
    "counted": collections.Counter("aab"),
    "kinds": [torch.float16, torch.device("cpu"), torch.Size((1, 2)), 1j, {1, 2}],
    "parameter": nn.Parameter(torch.ones(2)),
    "stored": [
        torch.arange(12.0).view(3, 4).t(),
        torch.zeros(1).expand(9),
    ],
}


def test_plain_values_come_back_as_they_were(tmp_path):
    check_plain(PLAIN, "values")
    (tmp_path / "values").write_bytes(to_bytes(PLAIN))
    check_same(read(tmp_path / "values"), PLAIN)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.ones(2, dtype=torch.uint16),
        lambda: torch.ones(2).to(torch.float8_e4m3fn),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
    ],
)
def test_tensors_of_all_kinds_come_back(tmp_path, make):
    check_plain({"x": make()}, "values")
    (tmp_path / "values").write_bytes(to_bytes({"x": make()}))
    got, want = read(tmp_path / "values")["x"], make()
    assert (got.dtype, got.layout, got.shape, got.device) == (
        want.dtype,
        want.layout,
        want.shape,
        want.device,
    )
    if not want.is_meta:
        assert torch.equal(got.to_dense().to(torch.complex64), want.to_dense().to(torch.complex64))


def test_what_the_user_declared_safe_is_plain(tmp_path):
    values = {"path": pathlib.PurePosixPath("x"), "bytes": bytearray(b"x")}
    with torch.serialization.safe_globals([pathlib.PurePosixPath, bytearray]):
        check_plain(values, "values")
        (tmp_path / "values").write_bytes(to_bytes(values))
        assert read(tmp_path / "values") == values


def test_values_without_checksums_come_back(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        (tmp_path / "values").write_bytes(to_bytes(PLAIN))
    finally:
        torch.serialization.set_crc32_options(True)
    check_same(read(tmp_path / "values"), PLAIN)


def test_a_pickle_before_the_archive_is_not_read(tmp_path):
    """torch takes a file that does not begin as an archive for one of its old ones."""
    (tmp_path / "values").write_bytes(pickle.dumps(bytearray(9), protocol=2) + to_bytes(PLAIN))
    check_same(read(tmp_path / "values"), PLAIN)


class Module(nn.Module):
    """Of a test."""


def local():
    class Local:
        pass

    return Local()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"f": lambda: 0}, r"it\['f'\]: .* came builtins\.function"),
        ({"a": 1, "b": [0, {"c": (1, lambda: 0)}]}, r"it\['b'\]\[1\]\['c'\]\[1\]: .*function"),
        ({"a": {1: local()}}, r"it\['a'\]\[1\]: .*came .*local\.<locals>\.Local"),
        ([[local()]], r"it\[0\]\[0\]: .*Local"),
        ({"m": Module()}, r"it\['m'\]: .*Module"),
        ({"path": pathlib.PurePosixPath("x")}, r"it\['path'\]: .*PurePosixPath"),
        ({"t": {"u": print}}, r"it\['t'\]\['u'\]: "),
        ({frozenset((local(),)): 1}, r"it: .*came builtins\.dict"),
        (local(), r"it: .*Local"),
        ({"a": [bytearray(b"x")]}, r"it\['a'\]\[0\]: .*came builtins\.bytearray"),
    ],
)
def test_what_would_need_code_is_refused_by_its_key(values, message):
    with pytest.raises(ValueError, match=message):
        check_plain(values, "it")


def test_a_file_that_needs_code_or_is_none_is_named(tmp_path):
    torch.save({"path": pathlib.PurePosixPath("x")}, tmp_path / "values")
    (tmp_path / "short").write_bytes(to_bytes(PLAIN)[:100])
    for name in ("values", "short"):
        with pytest.raises(RuntimeError, match=f"{name}: expected tensors and plain values"):
            read(tmp_path / name)
