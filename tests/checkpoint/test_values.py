"""Values become JSON and safetensors and come back as they were; the key of one that cannot.

What a user keeps in a checkpoint is made plain where that is easy, else refused by its key at the call.
"""

import collections
import json
import math
import pathlib
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from zeroshard.checkpoint.files import TENSORS, VALUES
from zeroshard.checkpoint.values import MAX_DEPTH, check_plain, read_values, to_files


def round_trip(folder, values):
    """What comes back of values that were written to files."""
    check_plain(values, "values")
    for name, data in to_files(values).items():
        (folder / name).write_bytes(data)
    return read_values(folder)


def check_same(got, want):
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype
        assert got.layout == want.layout
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
    "kinds": [torch.float16, torch.device("cpu"), torch.Size((1, 2)), 1j, {1, 2}, frozenset((3,))],
    "$tuple": {"$": [{"$tensor": "0"}], 1: "1", "1": 1, None: True, 0.5: (), (): b"\x00\xff"},
    "edges": [-0.0, float("-inf"), 5e-324, 2**4096, -(2**100_000), "\ud800", "\0", complex(0, -0.0)],
    "parameter": nn.Parameter(torch.ones(2)),
    "stored": [
        torch.arange(12.0).view(3, 4).t(),
        torch.zeros(1).expand(9),
    ],
}


def test_plain_values_come_back_as_they_were(tmp_path):
    check_same(round_trip(tmp_path, PLAIN), PLAIN)
    assert json.loads((tmp_path / VALUES).read_bytes())["$dict"]


def test_numbers_of_numpy_come_back_as_those_of_python(tmp_path):
    given = [numpy.float64(0.1), numpy.float32(0.5), numpy.bool_(True), numpy.str_("x"), {numpy.int64(7): 1}]
    check_same(round_trip(tmp_path, {"it": given})["it"], [0.1, 0.5, True, "x", {7: 1}])


def test_what_is_equal_and_not_the_same_comes_back_as_it_was(tmp_path):
    given = {"not a number": float("nan"), "zero": -0.0, "parts": complex(float("nan"), -0.0)}
    got = round_trip(tmp_path, given)
    assert math.isnan(got["not a number"])
    assert math.isnan(got["parts"].real)
    assert math.copysign(1, got["zero"]) == math.copysign(1, got["parts"].imag) == -1


def test_other_tools_read_the_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    round_trip(tmp_path, {"a": {"lr": 0.1, "weights": torch.arange(6.0).view(2, 3)}})
    assert json.loads((tmp_path / VALUES).read_text()) == {
        "a": {"lr": 0.1, "weights": {"$tensor": {"name": "0"}}}
    }
    assert torch.equal(safetensors.load_file(tmp_path / TENSORS)["0"], torch.arange(6.0).view(2, 3))


def test_gradients_are_asked_for_as_before(tmp_path):
    given = [torch.ones(2), torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2), False)]
    got = round_trip(tmp_path, {"x": given})["x"]
    assert [value.requires_grad for value in got] == [False, True, False]
    assert all(value.is_leaf for value in got)


def test_values_may_be_nested_up_to_a_limit(tmp_path):
    value = []
    for _ in range(MAX_DEPTH - 1):
        value = {1: value}
    check_same(round_trip(tmp_path, {"x": value})["x"], value)
    with pytest.raises(ValueError, match=r"it\['x'\]\[1\]\[1\].*nested up to 100 deep"):
        check_plain({"x": {1: {1: {1: value}}}}, "it")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2).to(torch.float8_e4m3fn),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        lambda: torch.ones(2, 0, 3, dtype=torch.uint64),
    ],
)
def test_tensors_of_all_kinds_come_back(tmp_path, make):
    got, want = round_trip(tmp_path, {"x": make()})["x"], make()
    assert (got.dtype, got.layout, got.shape, got.device) == (
        want.dtype,
        want.layout,
        want.shape,
        want.device,
    )
    assert torch.equal(got.to(torch.complex128), want.to(torch.complex128))


class Best(NamedTuple):
    loss: Any


def local():
    class Local:
        pass

    return Local()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"f": lambda: 0}, r"it\['f'\]: .* got builtins\.function"),
        ({"a": 1, "b": [0, {"c": (1, lambda: 0)}]}, r"it\['b'\]\[1\]\['c'\]\[1\]: .*function"),
        ({"a": {1: local()}}, r"it\['a'\]\[1\]: .*got .*local\.<locals>\.Local"),
        ({"path": pathlib.PurePosixPath("x")}, r"it\['path'\]: .*PurePosixPath.* such as str\(path\)"),
        ({"a": numpy.array([{}])}, r"it\['a'\]: .*numpy\.ndarray"),
        ({"best": Best(0.5)}, r"it\['best'\]: .*Best"),
        ({frozenset((local(),)): 1}, r"it: the key frozenset.*got .*Local"),
        (local(), r"it: .*Local"),
        ({"a": [bytearray(b"x")]}, r"it\['a'\]\[0\]: .*got builtins\.bytearray"),
        ({"a": [torch.empty(3, device="meta")]}, r"it\['a'\]\[0\]: .*got a meta one"),
        (
            {"a": torch.eye(3).to_sparse()},
            r"it\['a'\]: .*got another one. Give a sparse tensor as",
        ),
        ({"a": collections.defaultdict(int)}, r"it\['a'\]: .*got collections\.defaultdict"),
    ],
)
def test_what_would_need_code_is_refused_by_its_key(values, message):
    with pytest.raises(ValueError, match=message):
        check_plain(values, "it")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused_by_its_key():
    value = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    with pytest.raises(ValueError, match=r"it\['a'\]: .*got a quantized one"):
        check_plain({"a": value}, "it")


def test_a_file_that_is_damaged_is_named(tmp_path):
    round_trip(tmp_path, PLAIN)
    data = (tmp_path / VALUES).read_bytes()
    for damage in (data[:100], b"", b"\x80\x02"):
        (tmp_path / VALUES).write_bytes(damage)
        with pytest.raises(RuntimeError, match=f"{VALUES}: expected content in its format, found"):
            read_values(tmp_path)
    (tmp_path / VALUES).write_bytes(data)
    (tmp_path / TENSORS).write_bytes((tmp_path / TENSORS).read_bytes()[:-1])
    with pytest.raises(RuntimeError, match=TENSORS):
        read_values(tmp_path)
