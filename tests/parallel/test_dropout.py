"""Dropout over tensor ranks: one mask for whole values, other masks for parts, the same in a second run."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.training import seeded
from tests.parallel import runs
from tests.parallel.runs import BATCH, HEAD, PLAN, VOCABULARY, initialize
from tests.ranks import on_ranks

LENGTH = 9


class Drop(nn.Module):
    """Dropout of one half that notes its masks, or takes them from a list."""

    def __init__(self):
        super().__init__()
        self.noted, self.given = [], []

    def forward(self, x):
        mask = self.given.pop(0) if self.given else F.dropout(torch.ones_like(x), 0.5, self.training)
        self.noted.append(mask.detach())
        return x * mask


class Block(runs.Block):
    def __init__(self):
        super().__init__()
        self.of_heads, self.after_heads, self.of_hidden, self.after_hidden = (Drop() for _ in range(4))

    def forward(self, x):
        return self.hidden(self.heads(x))

    def heads(self, x):
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = self.each_head(q) @ self.each_head(k).transpose(-1, -2)
        mixed = self.of_heads(scores.softmax(-1)) @ v
        return x + self.after_heads(self.out(mixed.transpose(1, 2).flatten(2)))

    def hidden(self, x):
        return x + self.after_hidden(self.down(self.of_hidden(F.gelu(self.up(self.second(x))))))


class Model(runs.Model):
    def __init__(self):
        super().__init__(Block)
        self.first = Drop()

    def forward(self, tokens):
        x = self.first(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PARTS = {"of_heads": 1, "of_hidden": 2}
"""Dropout over parts, with the dimension of the parts."""
OF_SEQUENCE = PARTS | {"after_heads": 1, "after_hidden": 1}
BY_SEQUENCE = PLAN | {
    "blocks.0": "sequence_split",
    "blocks.*.norm": "sequence",
    "blocks.*.second": "sequence",
    "norm": "sequence",
}


def masks_of(model):
    return {name: module.noted for name, module in model.named_modules() if isinstance(module, Drop)}


def loss_of(model, number, own=slice(None)):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))[own]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


sgd = partial(torch.optim.SGD, lr=0.1)


def trained(config, steps, plan=PLAN):
    """Masks, losses and parameters of a divided model whose ranks have other random states."""
    model = seeded(Model).double()
    engine = initialize(model, sgd, config, plan)
    axes = engine._axes
    size = BATCH // axes.dp.size
    own = slice(axes.dp.rank * size, (axes.dp.rank + 1) * size)
    torch.manual_seed(100 + axes.dp.rank)
    losses = []
    for number in range(steps):
        torch.rand(1 + axes.tp.rank)  # as by a rank that draws more than others, or has a seed of its own
        loss = loss_of(engine, number, own)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = {"masks": masks_of(model), "losses": losses, "state": engine.full_state_dict()}
    return found | {"place": axes.dp.rank}


def with_masks(found, steps, parts=PARTS):
    """Losses and parameters of one process that drops what the ranks have dropped."""
    model, size = seeded(Model).double(), 1 + max(rank["place"] for rank in found)
    tensor = [[rank["masks"] for rank in found if rank["place"] == one] for one in range(size)]
    for name, module in model.named_modules():
        if isinstance(module, Drop):
            dim = parts.get(name.rpartition(".")[2])
            for number in range(steps):
                of_batch = [
                    ranks[0][name][number]
                    if dim is None
                    else torch.cat([rank[name][number] for rank in ranks], dim)
                    for ranks in tensor
                ]
                module.given.append(torch.cat(of_batch))
    optimizer, losses = sgd(model.parameters()), []
    for number in range(steps):
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(("num_ranks", "tp", "stage"), [(2, 2, 3), (4, 2, 1)])
@pytest.mark.parametrize("by_sequence", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_model_with_dropout_trains_as_one_process_with_the_same_masks(
    ranks, num_ranks, tp, stage, by_sequence
):
    plan, parts = (BY_SEQUENCE, OF_SEQUENCE) if by_sequence else (PLAN, PARTS)
    found = ranks(num_ranks, trained, {"stage": stage, "mesh": {"tp": tp}}, 3, plan)
    first, second = (rank["masks"] for rank in found[:2])  # tensor ranks with one batch
    for name, (mask, *later) in first.items():
        assert torch.equal(mask, second[name][0]) != (name.rpartition(".")[2] in parts), name
        assert not torch.equal(mask, later[0]), name
    losses, want = with_masks(found, 3, parts)
    got = [sum(of_all) / num_ranks for of_all in zip(*(rank["losses"] for rank in found), strict=True)]
    assert got == pytest.approx(losses, rel=1e-10)  # float64: sums in another order
    for name, value in found[0]["state"].items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=1e-10, msg=name)


def gradients_of_losses(kind, **config):
    """The gradients of two micro-batches; masks are drawn in the second run of a forward, too."""
    model = seeded(Model).double()
    for block in model.blocks:
        block.__class__ = kind
    config |= {"mesh": {"tp": 2}, "gradient_accumulation_steps": 3}
    engine = initialize(model, sgd, config, PLAN)
    torch.manual_seed(dist.get_rank())
    for number in range(2):
        engine.backward(loss_of(engine, number))
    engine.backward(0 * loss_of(engine, 2))
    return {name: p.grad.clone() for name, p in engine.module.named_parameters()}, torch.get_rng_state()


class Partly(Block):
    """A block that runs its second half again, by itself."""

    def forward(self, x):
        return checkpoint(self.hidden, self.heads(x), use_reentrant=False)


@on_ranks(2)
def test_a_second_run_drops_the_same_elements():
    want, want_state = gradients_of_losses(Block, stage=3)
    for kind, config in ((Block, {"recompute": "unit"}), (Partly, {})):
        got, got_state = gradients_of_losses(kind, stage=3, **config)
        assert torch.equal(got_state, want_state)
        assert all(torch.equal(value, want[name]) for name, value in got.items())


class Fails(Model):
    def forward(self, tokens, fails=False):
        wrong = [torch.ones(1)[[0, 0, 0]]]  # a mask that fits nothing
        self.blocks[0].of_hidden.given = wrong if fails else []
        return super().forward(tokens)


def after_an_error():
    model, tokens = Fails().double(), torch.arange(10).view(2, 5)
    engine = initialize(model, sgd, {"stage": 1, "mesh": {"tp": 2}}, PLAN)
    torch.manual_seed(7)
    with pytest.raises(RuntimeError, match="size"):
        engine(tokens, fails=True)
    state = torch.get_rng_state()
    engine(tokens)
    return state, masks_of(model)["first"][-1], masks_of(model)["blocks.0.of_hidden"][-1]


def test_an_error_in_a_region_leaves_the_shared_state(ranks):
    (state, whole, part), (other_state, other_whole, other_part) = ranks(2, after_an_error)
    assert torch.equal(state, other_state)
    assert torch.equal(whole, other_whole)
    assert not torch.equal(part, other_part)
