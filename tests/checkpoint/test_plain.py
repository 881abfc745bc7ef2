"""Values that load without running code, and the key of one that would not."""

import collections
import pathlib

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
}


def test_plain_values_come_back_as_they_were(tmp_path):
    check_plain(PLAIN, "values")
    (tmp_path / "values").write_bytes(to_bytes(PLAIN))
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
