"""A unit of several modules, listed by name in `units`."""

import copy

import pytest
import torch

import zeroshard
from tests.distributed.models import Residual, Stemmed
from tests.distributed.training import numbers, start
from tests.ranks import on_ranks
from zeroshard import Config

UNITS = (
    ["Residual", ["norm", "head"]],
    ["Residual", ("stem", "head")],
    [["blocks.0", "blocks.2"], ["blocks.1"], ["head", "norm", "stem"]],
)


@on_ranks(2)
def test_it_is_gathered_once_where_no_other_unit_runs_between_its_modules():
    """The gathers of a forward without a graph, where the two modules of a unit follow each other or not."""
    found = {}
    for number, units in enumerate(UNITS[:2]):
        engine, _ = start(Stemmed(), "SGD", stage=3, units=units)
        with torch.no_grad():
            engine(numbers(0, 5, 7))
            engine.reset_comm_report()
            engine(numbers(0, 5, 7))
        found[number] = engine.comm_report().calls["all_gather"]
        assert [unit.name for unit in engine.units if "+" in unit.name] == ["+".join(units[1])]
        assert "listed together" in next(unit.reason for unit in engine.units if "+" in unit.name)
    assert found[0] == 5  # three blocks, the root, and the unit once
    assert found[1] > 5  # twice, and a block that is fetched ahead in vain


def test_a_config_keeps_lists_of_module_names():
    config = Config(units=["Residual", ["norm", "head"]])
    assert config.units == ("Residual", ("norm", "head"))
    assert Config.from_dict(config.to_dict()) == config
    assert Config(units=[Residual, ("norm", "head")]) == config


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([["norm", "heads"]], "the model has no module named 'heads'; did you mean 'head'?"),
        (
            [["blocks.0", "blocks.0.up"]],
            "got 'blocks.0' and a module inside it in ['blocks.0', 'blocks.0.up']",
        ),
        (["Residual", ["blocks.0", "head"]], "a module of ['blocks.0', 'head'] that is in another unit too"),
        ([["norm", "head"], ["head", "stem"]], "a module of ['head', 'stem'] that is in another unit too"),
        ([["blocks", "head"]], "'blocks' is a ModuleList, whose forward is never called"),
        ([["", "head"]], "expected"),
        ([[]], "expected"),
    ],
)
def test_a_list_that_makes_no_unit_is_refused(units, message):
    with pytest.raises(ValueError, match="'units'") as error:
        zeroshard.initialize(copy.deepcopy(Stemmed()), None, {"units": units})
    assert message in str(error.value)
