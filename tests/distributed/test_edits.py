"""Parameters that a forward edits keep the edit, as in plain PyTorch and in DDP."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.training import (
    STAGES,
    differences,
    finish,
    numbers,
    same_as_replicated,
    start,
    step,
    train_replicated,
    train_sharded,
)


class Normalized(nn.Module):
    """Divides its weight by its norm in each forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(7, 7)), nn.Parameter(torch.randn(7))
        self.inner = nn.Linear(7, 7)

    def forward(self, x):
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return (self.inner(x) @ self.weight + self.bias).tanh()


class ByData(Normalized):
    def forward(self, x):
        self.weight.data = self.weight.data / self.weight.data.norm()
        return (self.inner(x) @ self.weight + self.bias).tanh()


class Transposes(Normalized):
    def forward(self, x):
        self.weight.data = self.weight.data.t()
        return super().forward(x)


class TransposesCopy(Normalized):
    def forward(self, x):
        self.weight.data = self.weight.data.t().clone(memory_format=torch.contiguous_format)
        return super().forward(x)


class BySet(Normalized):
    def forward(self, x):
        with torch.no_grad():
            self.weight.set_(self.weight / self.weight.norm())
        return (self.inner(x) @ self.weight + self.bias).tanh()


class Unedited(Normalized):
    def forward(self, x):
        return (self.inner(x) @ self.weight + self.bias).tanh()


class MovesUnseen(Unedited):
    """Gives parameters other memory and counts no version, as a recurrent layer on a GPU does."""

    def forward(self, x):
        for parameter in (self.weight, self.bias):
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
                parameter.set_(parameter.clone())
        return super().forward(x)


class ActNorm(Normalized):
    """Takes scale and shift from its first batch, by copies into `.data`."""

    def __init__(self):
        super().__init__()
        self.is_new = True

    def forward(self, x):
        if self.is_new:
            self.is_new = False
            self.weight.data.copy_(torch.diag(1 / x.detach().std(0)))
            self.bias.data[2:] = -x.detach().mean(0)[2:]
        return (self.inner(x) @ self.weight + self.bias).tanh()


class Teaching(nn.Module):
    """Learns from a teacher that is a moving average of it."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(7, 7), nn.Linear(7, 7).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for kept, learned in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                kept.mul_(0.75).add_(learned, alpha=0.25)
        return x + self.student(x) * self.teacher(x).tanh()


def build(block, num_blocks=3):
    torch.manual_seed(0)
    layers = [nn.Sequential(block(), nn.Linear(7, 7)) for _ in range(num_blocks)]
    return nn.Sequential(*layers, nn.Linear(7, 1))


def same_batch_loss(model, number):
    """The same inputs on all ranks, so that all make the same edits."""
    return model(numbers(number, 5, 7, rank=0)).square().mean()


def edited(block, units, **config):
    model = build(block)
    found = same_as_replicated(model, "SGD", 3, same_batch_loss, units=units, **config)
    want = model.state_dict()  # the model that was given is left alone
    assert all(torch.equal(value, want[name]) for name, value in build(block).state_dict().items())
    return found


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("block", [Normalized, ByData, ActNorm, Teaching])
def test_a_parameter_that_a_forward_edits_keeps_the_edit(ranks, num_ranks, block):
    for units in (["Sequential"], [block.__name__], []):
        assert not any(ranks(num_ranks, edited, block, units))


@pytest.mark.parametrize("block", [ActNorm, Teaching])
def test_all_edits_of_a_forward_are_kept_in_files(ranks, tmp_path, block):
    offload = {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    assert not any(ranks(2, edited, block, ["Sequential"], stages=(1, 3), offload=offload))


def given_other_memory(block, by_copy, units):
    """DDP loses gradients of such parameters, so it edits the same values by copies through `.data`."""
    want = train_replicated(build(by_copy), "SGD", 3, same_batch_loss)
    found = []
    for stage in STAGES:
        got = train_sharded(build(block), "SGD", 3, same_batch_loss, stage=stage, units=units)
        found += differences(f"stage {stage}", got, want)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("block", "by_copy"), [(BySet, ByData), (Transposes, TransposesCopy), (MovesUnseen, Unedited)]
)
def test_a_parameter_that_a_forward_gives_other_memory_keeps_the_values(ranks, num_ranks, block, by_copy):
    for units in (["Sequential"], []):
        assert not any(ranks(num_ranks, given_other_memory, block, by_copy, units))


def edited_twice(stage):
    model = build(Normalized)
    replica = copy.deepcopy(model)
    for block in replica[:3]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    made = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    want = finish(replica, [step(replica, made, same_batch_loss, number) for number in range(3)])
    engine, optimizer = start(model, "SGD", stage=stage, units=["Sequential"], recompute="unit")
    got = finish(engine, [step(engine, optimizer, same_batch_loss, number) for number in range(3)])
    return differences(f"stage {stage}", got, want)


def test_a_forward_that_recompute_runs_twice_edits_as_with_a_checkpoint_of_torch(ranks):
    for stage in STAGES:
        assert not any(ranks(2, edited_twice, stage))


def edited_in_shard_groups():
    model = build(Normalized)
    want = same_as_replicated(
        model, "SGD", 2, same_batch_loss, stages=[3], shard_group_size=2, reshard_after_forward=2
    )
    return [message for message in want if "loss" in message]


def test_edits_are_kept_where_two_groups_hold_copies(ranks):
    assert not any(ranks(4, edited_in_shard_groups))


class Fills(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(7, 7)), nn.Parameter(torch.randn(7))
        self.fails = False

    def forward(self, x):
        with torch.no_grad():
            self.weight[1:3] = 3.0
        if self.fails:
            raise LookupError("after the edit")
        return x @ self.weight + self.other


def edited_in_bfloat16(stage):
    torch.manual_seed(0)
    model = nn.Sequential(Fills(), Fills())
    want = copy.deepcopy(model.state_dict())
    engine, _ = start(model, "SGD", stage=stage, units=["Fills"], precision={"param_dtype": "bfloat16"})
    model[1].fails = True
    with torch.no_grad(), pytest.raises(LookupError):
        engine(numbers(0, 5, 7))
    for name in ("0.weight", "1.weight"):
        want[name][1:3] = 3.0
    state = engine.full_state_dict()
    return [name for name, value in state.items() if not torch.equal(value, want[name])]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_edit_in_a_narrow_dtype_leaves_the_other_elements_as_they_are(ranks, num_ranks):
    for stage in STAGES:
        assert not any(ranks(num_ranks, edited_in_bfloat16, stage))


class Reshapes(Normalized):
    def forward(self, x):
        self.weight.data = self.weight.data[:3]
        return x


def reshaped(stage):
    engine, _ = start(build(Reshapes, 1), "SGD", stage=stage)
    with pytest.raises(RuntimeError) as error:
        engine(numbers(0, 5, 7))
    return str(error.value)


def test_data_of_another_shape_is_refused_by_name(ranks):
    for stage in STAGES:
        for message in ranks(2, reshaped, stage):
            assert "'0.0.weight'" in message
            assert "expected new data of the shape [7, 7], got [3, 7]" in message


class Swaps(Normalized):
    clones = False

    def forward(self, x):
        one, other = self.weight.data, self.inner.weight.data
        if self.clones:
            one, other = one.clone(), other.clone()
        self.weight.data, self.inner.weight.data = other, one
        return super().forward(x)


def swapped(stage):
    engine, optimizer = start(build(Swaps, 1), "SGD", stage=stage)
    with pytest.raises(RuntimeError) as error:
        engine(numbers(0, 5, 7))
    engine.module[0][0].clones = True
    got = finish(engine, [step(engine, optimizer, same_batch_loss, 0)])
    model = build(Swaps, 1)
    model[0][0].clones = True
    want = train_replicated(model, "SGD", 1, same_batch_loss)
    return str(error.value), differences(f"stage {stage}", got, want)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_data_of_another_parameter_is_refused_by_name_and_a_copy_of_it_is_kept(ranks, num_ranks):
    for stage in STAGES:
        for message, found in ranks(num_ranks, swapped, stage):
            assert "'0.0.weight' was given the data of another parameter" in message
            assert "clone both first" in message
            assert not found


class TakesTrained(nn.Module):
    """A frozen weight in the memory of a trained one, which lies in another flat buffer."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen = nn.Linear(7, 7), nn.Linear(7, 7).requires_grad_(False)

    def forward(self, x):
        self.frozen.weight.data = self.trained.weight.data
        return self.frozen(self.trained(x))


def taken(stage):
    engine, _ = start(TakesTrained(), "SGD", stage=stage)
    with pytest.raises(RuntimeError) as error:
        engine(numbers(0, 5, 7))
    return str(error.value)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_data_of_a_parameter_in_another_buffer_is_refused_by_name(ranks, num_ranks):
    for stage in STAGES:
        for message in ranks(num_ranks, taken, stage):
            assert "'frozen.weight' was given the data of another parameter" in message


def shown(stage):
    model = build(Normalized, 1)
    replica = copy.deepcopy(model)
    engine, optimizer = start(model, "SGD", stage=stage)
    messages, x = [], numbers(0, 5, 7, rank=0)
    for edit in (
        lambda p: p.mul_(2.0),
        lambda p: p.data.mul_(2.0),
        lambda p: setattr(p, "data", p.data * 2),
    ):
        for name in ("0.0.weight", "1.bias"):
            with engine.unsharded(), torch.no_grad():
                assert model(x).shape == (5, 1)
                edit(dict(model.named_parameters())[name])
                with pytest.raises(RuntimeError) as error:
                    model(x)
                messages.append(str(error.value))
                assert f"after an edit of '{name}'" in messages[-1], messages
                assert "write_back=True" in messages[-1]
    with torch.no_grad():  # in the replica as often as above; a division by the norm 1 may change a bit
        for _ in range(6):
            replica(x)
    optimizer_of_replica = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    got = finish(engine, [step(engine, optimizer, same_batch_loss, 1)])
    return differences(
        f"stage {stage}", got, finish(replica, [step(replica, optimizer_of_replica, same_batch_loss, 1)])
    )


def copied_while_shown(stage):
    engine, _ = start(build(Normalized, 1), "SGD", stage=stage)
    with engine.unsharded():
        shown = engine.module[1].weight
        made = nn.Parameter(shown)
        assert isinstance(made, nn.Parameter)
        assert made.requires_grad
        assert made.data_ptr() == shown.data_ptr()
        assert type(shown.detach()) is type(shown.data) is torch.Tensor
        layer = nn.Linear(7, 1)
        layer.weight = made
        assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def test_a_shown_parameter_can_become_that_of_another_module(ranks):
    for stage in STAGES:
        ranks(2, copied_while_shown, stage)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_forward_inside_unsharded_after_an_edit_there_is_refused_by_name(ranks, num_ranks):
    for stage in STAGES:
        assert not any(ranks(num_ranks, shown, stage))
