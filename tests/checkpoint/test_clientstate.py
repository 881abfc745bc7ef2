"""What a user keeps in a checkpoint: made plain where that is easy, else refused by its key at the call."""

import collections
import enum
import pathlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from tests.checkpoint.runs import start
from tests.checkpoint.test_values import check_same, round_trip
from tests.ranks import on_ranks
from zeroshard.checkpoint.values import Given, check_plain


class Mode(enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


class Best(NamedTuple):
    loss: Any
    place: Any


@dataclass
class Options:
    rate: Any = field(default_factory=lambda: numpy.float64(0.1))
    mode: Mode = Mode.FAST
    best: Best = field(default_factory=lambda: Best(numpy.float32(0.5), pathlib.Path("a/b")))


class Name(str):
    pass


GIVEN = {
    "numbers": [numpy.float64(0.1), numpy.float32(0.5), numpy.int64(3), numpy.bool_(True), numpy.str_("x")],
    "array": numpy.arange(6).reshape(2, 3)[:, ::-1],
    "path": pathlib.PurePosixPath("a/b"),
    "options": Options(),
    "enums": {Mode.FAST: Level.HIGH},
    "default": collections.defaultdict(int, a=1),
    numpy.int64(7): Name("y"),
    "set": {numpy.int64(1), 2},
}
PLAIN = {
    "numbers": [0.1, 0.5, 3, True, "x"],
    "array": torch.tensor([[2, 1, 0], [5, 4, 3]]),
    "path": "a/b",
    "options": {"rate": 0.1, "mode": "fast", "best": (0.5, "a/b")},
    "enums": {"fast": 3},
    "default": {"a": 1},
    7: "y",
    "set": {1, 2},
}


def test_values_that_are_easily_made_plain_come_back_as_such(tmp_path):
    check_same(round_trip(tmp_path, {"it": Given(GIVEN)})["it"], PLAIN)


def test_plain_values_come_back_as_they_were(tmp_path):
    values = [torch.ones(2), collections.OrderedDict(a=1), collections.Counter("aab"), torch.Size((1, 2)), 1j]
    check_same(round_trip(tmp_path, {"it": Given(values)})["it"], values)


def loop():
    value: list[Any] = []
    value.append(value)
    return {"a": value}


def test_what_the_user_declared_safe_for_torch_is_made_plain_as_all_else(tmp_path):
    with torch.serialization.safe_globals([Options, pathlib.PurePosixPath]):
        given = [Options(), pathlib.PurePosixPath("a")]
        check_same(round_trip(tmp_path, {"it": Given(given)})["it"], [PLAIN["options"], "a"])


@dataclass
class Holds:
    what: Any


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"a": Holds([lambda: 0])},
            r"client_state\['a'\]\['what'\]\[0\]: expected tensors, .*got builtins.function",
        ),
        ({"a": {"f": print}}, r"client_state\['a'\]\['f'\]: expected"),
        ({"a": numpy.array([{}])}, r"client_state\['a'\]: expected an array of numbers"),
        ({Mode.FAST: 1, "fast": 2}, r"client_state: expected different keys, .*as 'fast'"),
        (
            {"a": [torch.empty(3, device="meta")]},
            r"client_state\['a'\]\[0\]: expected a tensor with values and",
        ),
        ({"a": Holds(torch.empty((), device="meta"))}, r"client_state\['a'\]\['what'\]: expected a tensor"),
        (loop(), r"nested up to 100 deep, and no value that holds itself"),
    ],
)
def test_what_cannot_be_made_plain_is_refused_by_its_key(value, message):
    with pytest.raises(ValueError, match=message):
        check_plain(Given(value), "client_state")


META = {"a": nn.Parameter(torch.empty(2, device="meta"))}


@pytest.mark.parametrize("blocking", [True, False])
@on_ranks(2)
def test_a_save_takes_and_refuses_the_same_in_the_background(tmp_path, blocking):
    """What came back, and what was said of values that cannot be saved."""
    engine = start(3)
    engine.save_checkpoint(tmp_path, client_state=GIVEN, blocking=blocking)
    said = []
    for given in ({"a": {"f": print}}, META):
        try:
            engine.save_checkpoint(tmp_path, client_state=given, blocking=blocking)
        except ValueError as error:
            said.append(str(error))
    loaded = engine.load_checkpoint(tmp_path)
    check_same(loaded, PLAIN)
    assert [text.partition(",")[0] for text in said] == [
        "client_state['a']['f']: expected tensors",
        "client_state['a']: expected a tensor with values and without attributes of its own",
    ]
