"""Steps of activations over the tensor ranks give the values and gradients of one process."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.parallel.tensor.sequence import Activations, Comm, move

RANKS = [1, 2, 3, 4]
D, HIDDEN, ROWS = 12, 24, 24
EXACT = {"rtol": 0, "atol": 1e-12}
"""In float64: sums are taken in another order than in one process."""


def tensor_ranks():
    axis = Axis(dist.group.WORLD, device=torch.device("cpu"), counter=Counter(), timeout_s=20.0)
    return Activations(axis, tag=3)


def values(*shape, salt=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64).to(dtype)


def part(value, dim, over):
    return value.chunk(over.size, dim)[over.rank].clone()


# ---------------------------------------------------------------------------------------------- exchanges


def exchanged(dtype):
    """Results of each exchange, for tensors that differ by rank, beside the expected ones."""
    over = tensor_ranks()
    found = []
    for shape in ((5,), (2, 6), (over.size, 12, 2)):
        everyone = [values(*shape, salt=rank, dtype=dtype) for rank in range(over.size)]
        total = sum((one.float() if dtype is torch.bfloat16 else one for one in everyone[1:]), everyone[0])
        found.append((over.sum(everyone[over.rank], "test"), total.to(dtype)))
        for dim in range(len(shape)):
            found.append((over.gather(everyone[over.rank], dim, "test"), torch.cat(everyone, dim)))
            if shape[dim] % over.size == 0:
                found.append(
                    (over.scatter(everyone[over.rank], dim, "test"), part(total.to(dtype), dim, over))
                )
                found.append((over.split(everyone[0], dim), part(everyone[0], dim, over)))
    found.append((over.sum(values(0, dtype=dtype), "test"), values(0, dtype=dtype)))
    if over.size == 2:
        text = "expected a multiple of the 2 tensor-parallel ranks in dimension 1"
        with pytest.raises(ValueError, match=text):
            over.split(values(2, 5), 1)
    return found


@pytest.mark.long_where(num_ranks=[3])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_are_taken_in_the_order_of_ranks_and_rounded_once(ranks, num_ranks, dtype):
    for found in ranks(num_ranks, exchanged, dtype):
        for got, want in found:
            assert got.dtype == want.dtype == dtype
            assert torch.equal(got, want)


# -------------------------------------------------------------------------------------------------- layers


def pair(by_sequence):
    """An MLP divided by columns, then rows; its input and output divided along the sequence, or whole."""
    over = tensor_ranks()
    x, up, down = values(ROWS, D, salt=1), values(HIDDEN, D, salt=2), values(D, HIDDEN, salt=3)
    whole = [one.clone().requires_grad_() for one in (x, up, down)]
    want = F.linear(F.gelu(F.linear(whole[0], whole[1])), whole[2])
    weight = values(*want.shape, salt=4)
    (want * weight).sum().backward()

    def own(value):
        return part(value, 0, over) if by_sequence else value

    mine = [one.requires_grad_() for one in (own(x).clone(), part(up, 0, over), part(down, 1, over))]
    there, back = (Comm.GATHER_SUMMANDS, Comm.SUM_TO_PARTS) if by_sequence else (Comm.COPY, Comm.SUM)
    hidden = F.gelu(F.linear(move(mine[0], there, over, "mlp", 0), mine[1]))
    got = move(F.linear(hidden, mine[2]), back, over, "mlp", 0)
    (got * own(weight)).sum().backward()
    wanted = (own(want), own(whole[0].grad), part(whole[1].grad, 0, over), part(whole[2].grad, 1, over))
    return list(zip((got.detach(), *(one.grad for one in mine)), wanted, strict=True))


def gathered_and_split():
    """A layer divided by columns whose output is gathered; then every rank takes its rows again."""
    over = tensor_ranks()
    x, weight = values(ROWS, D, salt=1), values(HIDDEN, D, salt=2)
    whole = [one.clone().requires_grad_() for one in (x, weight)]
    want = F.linear(*whole).tanh()
    want.square().sum().backward()
    mine = [x.clone().requires_grad_(), part(weight, 0, over).requires_grad_()]
    columns = F.linear(move(mine[0], Comm.COPY, over, "layer"), mine[1])
    out = move(columns, Comm.GATHER, over, "layer").tanh()
    rows = move(out, Comm.SPLIT, over, "layer", 0)
    rows.square().sum().backward()
    wanted = (part(want, 0, over), whole[0].grad, part(whole[1].grad, 0, over))
    return list(zip((rows.detach(), mine[0].grad, mine[1].grad), wanted, strict=True))


LAYERS = {
    "columns then rows": functools.partial(pair, by_sequence=False),
    "columns then rows, along the sequence": functools.partial(pair, by_sequence=True),
    "gathered and split": gathered_and_split,
}


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", LAYERS)
def test_columns_then_rows_are_the_layers_of_one_process(ranks, num_ranks, name):
    for found in ranks(num_ranks, LAYERS[name]):
        for got, want in found:
            torch.testing.assert_close(got, want.detach(), **EXACT)
