"""What of a checkpoint fits which model: names that are tied, and models that are others."""

import functools

import torch
from torch import nn

from tests.checkpoint.runs import Net, batch, differences, refused, saved, start, state, train
from tests.ranks import on_ranks

# ------------------------------------------------------------------------------------------ going back


@on_ranks(2)
def test_an_engine_that_has_gone_on_goes_back_to_the_bit(tmp_path):
    """It went on after it saved, loads that, and goes on again."""
    engine = saved(tmp_path, {"stage": 3, "precision": {"param_dtype": "bf16"}})
    stop, end = state(engine), state(engine, train(engine, [2]))
    engine(batch(0)[:, :-1])  # what this gathered is there when it loads
    engine.load_checkpoint(tmp_path)
    found = differences(state(engine), stop)
    again = state(engine, train(engine, [2]))
    return found + differences(again, end) + ([] if again.losses == end.losses else ["other losses"])


# ---------------------------------------------------------------------------------------- another model


class Missing(Net):
    """Lacks a parameter of the checkpoint."""

    def __init__(self, **options):
        super().__init__(**options)
        del self.unused


class More(Net):
    """Has one more."""

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[1].more = nn.Parameter(torch.ones(3))


class OtherBuffers(Net):
    def __init__(self, *, late=True, **options):
        super().__init__(**options)
        self.register_buffer(*("late", torch.ones(3)) if late else ("count", torch.zeros(3)))


class MoreExtra(Net):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        raise AssertionError("nothing was saved for it")


OTHERS = {
    "missing": (Missing, {}, "only the checkpoint has parameter 'unused'"),
    "more": (More, {}, "expected parameter 'blocks.1.more' of the model, found none"),
    "misshapen": (
        Net,
        {"hidden": 14},
        r"parameter 'mix' has shape (5, 20, 13); the model expects (5, 20, 14)",
    ),
    "untied here": (Net, {"tied": False}, "the checkpoint ties 'tokens.weight' and 'head.weight'; the model"),
    "another buffer": (OtherBuffers, {}, "only the model has a buffer 'late'"),
    "misshapen buffer": (
        OtherBuffers,
        {"late": False},
        "buffer 'count' has shape (); the model expects (",
    ),
    "more extra state": (MoreExtra, {}, "only the model has extra state '_extra_state'"),
}
SAVED_OTHERS = {
    "untied there": (
        Net,
        {"tied": False},
        "the model ties 'head.weight' and 'tokens.weight'; the checkpoint",
    ),
    "extra state there": (MoreExtra, {}, "only the checkpoint has extra state '_extra_state'"),
}


@on_ranks(1)
def test_a_checkpoint_of_another_model_is_refused_by_name_and_changes_nothing(tmp_path):
    net = (Net, {})
    for name, (kind, options, message) in (OTHERS | SAVED_OTHERS).items():
        (there, made), (here, own) = (net, (kind, options)) if name in OTHERS else ((kind, options), net)
        saved(tmp_path / name, numbers=(), model=there(**made))
        said = refused(start(3, model=here(**own)), tmp_path / name)
        assert f"'{tmp_path / name}/step-0.0': {message}" in said


# ------------------------------------------------------------------------------------------------- names


class HeadFirst(Net):
    """The same model, whose tied parameter is first found under its other name."""

    def __init__(self, **options):
        super().__init__(**options)
        tokens = self.tokens
        del self.tokens
        self.tokens = tokens


def head_apart(model, rates=(5e-3, 1e-2)):
    others = [p for p in model.parameters() if p is not model.head.weight]
    groups = [{"params": [model.head.weight], "lr": rates[0]}, {"params": others, "lr": rates[1]}]
    return torch.optim.AdamW(groups)


@on_ranks(2)
def test_a_tied_parameter_is_found_under_any_of_its_names(tmp_path):
    engine = saved(tmp_path, 3, head_apart)
    torch.manual_seed(1)
    other = start(3, functools.partial(head_apart, rates=(1.0, 1.0)), model=HeadFirst())
    names = [e.optimizer.param_groups[0]["params"][0].fqn for e in (engine, other)]
    assert names == ["tokens.weight", "head.weight"]
    other.load_checkpoint(tmp_path)
    assert [group["lr"] for group in other.optimizer.param_groups] == [5e-3, 1e-2]
    assert train(other, [2, 3]) == train(engine, [2, 3])
