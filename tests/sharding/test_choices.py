"""Which lists a forward runs whole, as far as its source tells."""

import random
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroshard.plan.choices import chosen_among
from zeroshard.plan.wrapping import find_units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.more = nn.ModuleList(Block() for _ in range(3)), nn.ModuleList([Block(), Block()])
        self.by_name, self.depth, self.rate = nn.ModuleDict({"a": Block(), "b": Block()}), 3, 0.1


class ByIndex(Listed):
    def forward(self, x, task):
        return self.blocks[task](x)


class ByKey(Listed):
    def forward(self, x, task: str):
        return self.by_name[task](self.by_name["a"](x))


class ByTasks(Listed):
    def forward(self, x, tasks):
        return [self.blocks[task](x) for task in tasks]


class Dropped(Listed):
    def forward(self, x):
        for block in self.blocks:
            if self.training and torch.rand(()) < self.rate:
                continue
            x = block(x)
        return x


class DroppedInside(Listed):
    def forward(self, x):
        for block in self.blocks:
            if self.training and self.rate > 0:
                chance = torch.rand(())
                if chance < self.rate:
                    continue
            x = block(x)
        return x


class DroppedByVariable(Listed):
    def forward(self, x):
        for number, block in enumerate(self.blocks):
            skip = torch.rand(()).item() < self.rate * number
            if not skip:
                x = block(x)
        return x


class Routed(Listed):
    def forward(self, x, gates):
        for i in range(self.depth):
            rows = gates[:, i].nonzero()
            if rows.numel() > 0:
                x[rows] = self.blocks[i](x[rows])
        return x


class Method(Listed):
    def pick(self, x, which):
        return self.more[which](x)

    def forward(self, x):
        return self.blocks[0](x)


CHOOSING = {
    ByIndex: {"blocks"},
    ByKey: {"by_name"},
    ByTasks: {"blocks"},
    Dropped: {"blocks"},
    DroppedInside: {"blocks"},
    DroppedByVariable: {"blocks"},
    Routed: {"blocks"},
    Method: {"more"},
}


class EndedByBreak(Listed):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.norm() < 1:
                break
        return x


class EndedByReturn(Listed):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.rate > 0 and x.norm() < 1:
                return x
        for block in self.more:
            x = block(x)
        return x


class ReturnedBefore(Listed):
    def forward(self, x):
        if x.sum() < 0:
            return x
        for block in self.blocks:
            x = block(x)
        return x


class ByNamedItem(Listed):
    def forward(self, x, task):
        head = self.blocks[task]
        return head(x)


class ByNamedList(Listed):
    def forward(self, x, task):
        blocks = self.blocks
        return blocks[task](x)


class Conditional(Listed):
    def forward(self, x, gate):
        for block in self.blocks:
            x = block(x) if gate else x
        return x


class Masked(Listed):
    def forward(self, x, keep):
        for i, (block, is_kept) in enumerate(zip(self.blocks, keep, strict=True)):
            if i == 0 or is_kept:
                x = block(x)
        return x


class Drawn(Listed):
    def forward(self, x):
        for block in random.sample(list(self.more), 1):
            x = block(x)
        return random.choice(self.blocks)(x)


class Sliced(Listed):
    def forward(self, x, depth):
        for block in self.blocks[:depth]:
            x = block(x)
        for i in range(int(torch.randint(2, ()))):
            x = self.more[i](x)
        return x


class RangeOfLocal(Listed):
    def forward(self, x):
        depth = int(torch.randint(3, ()))
        for i in range(depth):
            x = self.blocks[i](x)
        return x


class Summed(Listed):
    def forward(self, x, mask):
        more = [self.more[i](x) for i in range(2) if mask[i]]
        return sum(block(x) for block in self.blocks if x.norm() > 1) + sum(more)


class SkippedByAttribute(Listed):
    def forward(self, x):
        for block in self.blocks:
            self.is_skipped = torch.rand(()) < self.rate
            if not self.is_skipped:
                x = block(x)
        return x


CHOOSING |= {
    EndedByBreak: {"blocks"},
    EndedByReturn: {"blocks", "more"},
    ReturnedBefore: {"blocks"},
    ByNamedItem: {"blocks"},
    ByNamedList: {"blocks"},
    Conditional: {"blocks"},
    Masked: {"blocks"},
    Drawn: {"blocks", "more"},
    Sliced: {"blocks", "more"},
    RangeOfLocal: {"blocks"},
    Summed: {"blocks", "more"},
    SkippedByAttribute: {"blocks"},
}


class Whole(Listed):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class WholeByIndex(Listed):
    def forward(self, x):
        for i in range(len(self.blocks)):
            x = self.blocks[i](x)
        for i in range(2):
            x = self.more[1 - i](x)
        return self.by_name["b"](self.blocks[-1](x))


class WithCheckpoints(Listed):
    def forward(self, x, mask=None):
        outputs = []
        for i, (block, other) in enumerate(zip(self.blocks[: self.depth], self.more, strict=False)):
            if self.training and self.rate:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                y = block(x)
                x = y
            if mask is not None:
                y = other(x) * mask
                x = y + x
            else:
                x = other(x)
            if i in outputs:
                outputs.append(x)
        return x


class Configured(Listed):
    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if i % 2 == 0 and self.rate > 0:
                continue
            x = block(x)
        return x


class Guarded(Listed):
    def forward(self, x, mask=None, use_cache=False, output_hidden_states=False):
        if x is None or x.dim() == 1 or isinstance(x, tuple):
            return x
        if not self.training and not torch.is_grad_enabled():
            return x
        if self.rate < 0 or x.dtype is torch.int64 or (use_cache and not output_hidden_states):
            return x
        is_masked = self.training and mask is not None
        for block in self.blocks:
            x = block(x) if self.training else checkpoint(block, x)
            x = block(x) if is_masked else x
            if mask is None:
                break
        if x.norm() > 1:
            return x
        return -x


class Bounded(Listed):
    def forward(self, x, features):
        depth, last = len(self.blocks), self.depth - 1
        counter = 0
        for i in range(depth):
            more = self.more[counter]
            x = more(self.blocks[i](x))
            counter += 1  # noqa: SIM113
        for block in self.blocks[:last]:
            x = block(x)
        for step in range(x.shape[1]):
            for block in self.more:
                x = block(x) + step
        levels = [self.blocks[i](features[i]) for i in range(len(features))]
        return sum(block(x) for block, level in zip(self.blocks, levels, strict=True) if level is not None)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))

    def forward(self, x):
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x


@pytest.mark.parametrize("kind", CHOOSING)
def test_lists_of_which_a_forward_may_run_a_part_are_told_by_the_source(kind):
    assert chosen_among(kind()) == CHOOSING[kind]


@pytest.mark.parametrize(
    "kind", [Whole, WholeByIndex, WithCheckpoints, Configured, Guarded, Bounded, Nested, Listed]
)
def test_lists_that_a_forward_runs_whole_are_not_taken_for_a_choice(kind):
    assert chosen_among(kind()) == set()


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.tail = inner, nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.tail:
            x = block(x)
        return x


def reasons(model, policy=None):
    return {spec.name: spec.reason for spec in find_units(model, policy)}


def test_what_holds_the_choice_is_the_unit_and_units_say_why():
    assert reasons(Around(Dropped())) == {
        "": "the rest",
        "inner": "a Dropped, whose forward chooses among the modules in 'blocks'",
        "tail.0": "one of 2 of class Block in 'tail'",
        "tail.1": "one of 2 of class Block in 'tail'",
    }
    assert reasons(ByIndex()) == {
        "": "the rest; its forward chooses among the modules in 'blocks'",
        "more.0": "one of 2 of class Block in 'more'",
        "more.1": "one of 2 of class Block in 'more'",
    }
    assert reasons(Whole(), ["Block"])["blocks.1"] == "a Block, listed in units="
    large = reasons(nn.ModuleDict({"head": nn.Linear(1024, 1024, bias=False, device="meta")}))
    assert large["head"] == "a Linear of 1,048,576 elements, 1,048,576 or more, outside of blocks"


def test_the_clusters_of_torchs_adaptive_softmax_are_no_units_but_it_is_one():
    softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 100, cutoffs=[10, 30, 60])
    assert list(reasons(Around(softmax))) == ["", "inner", "tail.0", "tail.1"]
    large = nn.AdaptiveLogSoftmaxWithLoss(2048, 3000, cutoffs=[1000, 2000], device="meta")
    assert list(reasons(large)) == ["", "head"]  # which every forward runs


@pytest.mark.parametrize("policy", [["ModuleList"], lambda module: isinstance(module, nn.ModuleList)])
def test_a_list_as_a_unit_is_refused_with_what_to_name(policy):
    with pytest.raises(ValueError, match=r"'blocks' is a ModuleList, whose forward is never.*\(Block\)"):
        find_units(Whole(), policy)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:UserWarning")
def test_a_scripted_module_is_refused_wherever_it_is():
    scripted = torch.jit.script(Block())
    with pytest.raises(ValueError, match=r"the model is a scripted .*compile=True"):
        find_units(scripted, None)
    with pytest.raises(ValueError, match=r"module '1' is a scripted"):
        find_units(nn.Sequential(nn.Linear(2, 2), scripted), None)


class DropsLayers(nn.Module):
    def __init__(self, layerdrop):
        super().__init__()
        self.layerdrop, self.blocks = layerdrop, nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            if self.training and torch.rand(()) < self.layerdrop:
                continue
            x = block(x)
        return x


def test_blocks_that_are_left_out_with_a_chance_of_0_are_no_choice():
    assert chosen_among(DropsLayers(0.1)) == {"blocks"}
    assert chosen_among(DropsLayers(0.0)) == set()


def test_the_chance_may_be_in_a_config():
    for chance, lists in ((0.1, {"blocks"}), (0.0, set())):
        model = DropsLayers(chance)
        del model.layerdrop
        model.config = types.SimpleNamespace(layerdrop=chance)
        assert chosen_among(model) == lists


class Pretrained(Around):
    _no_split_modules = ("Block",)


def test_blocks_that_a_model_names_are_left_whole_where_a_forward_chooses_among_them():
    found = reasons(Pretrained(Dropped()))
    assert list(found) == ["", "inner", "tail.0", "tail.1"]
    assert found["inner"] == (
        "a Dropped, whose forward chooses among the modules in 'blocks'; units=['Block'] cuts it"
    )
    assert found["tail.0"] == "a Block, named in the model's _no_split_modules"
    assert list(reasons(Pretrained(Dropped()), ["Block"]))[1:4] == [
        f"inner.blocks.{number}" for number in range(3)
    ]
