"""A frozen copy averaged with a trained one in the same engine, against plain PyTorch."""

import copy

import pytest
import torch
from torch import nn

from tests.distributed.training import ALL_STAGES, finish, plain, replicate, square_loss, start

MOMENTUM = 0.75


class Pair(nn.Module):
    """A student, and a teacher that is its moving average."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(7, 90), nn.Tanh(), nn.Linear(90, 3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.mul_(0.5)

    def forward(self, x):
        return self.student(x) - self.teacher(x)


def pairs(model):
    return zip(model.teacher.parameters(), model.student.parameters(), strict=True)


@torch.no_grad()
def in_place(model):
    for p, q in pairs(model):
        p.mul_(MOMENTUM).add_(q, alpha=1 - MOMENTUM)


@torch.no_grad()
def for_each(model):
    torch._foreach_lerp_([*model.teacher.parameters()], [*model.student.parameters()], 1 - MOMENTUM)


@torch.no_grad()
def copied(model):
    for p, q in pairs(model):
        p.copy_(MOMENTUM * p + (1 - MOMENTUM) * q)


@torch.no_grad()
def replaced(model):
    for p, q in pairs(model):
        p.data = p.data * MOMENTUM + q.data * (1 - MOMENTUM)


WAYS = {"in place": in_place, "for each": for_each, "copied": copied, "data": replaced}


def averaged_whole(way):
    """Where parameters are not those of DDP, after averages under unsharded()."""
    found = []
    replica = replicate(Pair())
    reference = torch.optim.SGD(plain(replica).student.parameters(), lr=0.05)
    for number in range(3):
        square_loss(replica, number).backward()
        reference.step()
        reference.zero_grad()
        WAYS[way](plain(replica))
    for stage in ALL_STAGES:
        model = Pair()
        engine, optimizer = start(model, torch.optim.SGD(model.student.parameters(), lr=0.05), stage=stage)
        for number in range(3):
            square_loss(engine, number).backward()
            optimizer.step()
            optimizer.zero_grad()
            with engine.unsharded(write_back=True):
                WAYS[way](model)
        got, want = finish(engine, []).parameters, plain(replica).state_dict()
        found += [(stage, name) for name in got if not torch.allclose(got[name], want[name], 1e-6, 1e-7)]
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("way", ["in place", "for each", "data"])
def test_a_teacher_is_averaged_under_unsharded(ranks, num_ranks, way):
    assert ranks(num_ranks, averaged_whole, way) == [[]] * num_ranks


def averaged_slices(way):
    """By stage: the error of an average of slices, or the names that differ from the average of the whole."""
    answers = []
    for stage in ALL_STAGES:
        engine, _ = start(Pair(), "SGD", stage=stage)
        reference = Pair()
        WAYS[way](reference)
        try:
            WAYS[way](engine.module)
        except RuntimeError as error:
            answers.append(str(error))
            finish(engine, [])
        else:
            got, want = finish(engine, []).parameters, reference.state_dict()
            answers.append([name for name in got if not torch.equal(got[name], want[name])])
    return answers


@pytest.mark.parametrize("way", ["in place", "for each"])
def test_averages_of_slices_are_right_or_refused_by_name_on_all_ranks(ranks, way):
    assert ranks(1, averaged_slices, way) == [[[]] * len(ALL_STAGES)]
    for answers in ranks(2, averaged_slices, way):
        assert (answers[0], answers[3]) == ([], [])
        for answer in answers[1:3]:
            names = ("'teacher.0.weight'", "'student.0.weight'", "engine.unsharded(write_back=True)")
            assert [name for name in names if name not in answer] == [], answer


def test_what_is_computed_from_a_slice_does_not_fit_where_that_is_cut(ranks):
    """It has no name any more, so the error is torch's own, on the ranks that do not hold all of a slice."""
    for stages in zip(*ranks(2, averaged_slices, "copied"), strict=True):
        assert all(answer == [] for answer in stages) or any("size of tensor" in answer for answer in stages)


def slice_in_an_expression():
    """The error of a whole parameter and an expression of a slice."""
    engine, _ = start(Pair(), "SGD", stage=1)
    model, messages = engine.module, []
    with torch.no_grad():
        for p, q in pairs(model):
            try:
                p.mul_(MOMENTUM).add_((1 - MOMENTUM) * q)
            except RuntimeError as error:
                messages.append(str(error))
    return messages


def test_an_expression_of_a_slice_that_does_not_fit_is_an_error_that_names_the_other(ranks):
    messages = [message for found in ranks(2, slice_in_an_expression) for message in found]
    assert messages
    assert all("'teacher." in message and "write_back=True" in message for message in messages)
