"""Exchanges of activations over the tensor ranks give the values of one process."""

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Axis
from zeroshard.parallel.tensor.sequence import Activations


def tensor_ranks():
    axis = Axis(dist.group.WORLD, device=torch.device("cpu"), timeout_s=20.0)
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
        with pytest.raises(ValueError, match="a multiple of the 2 tensor-parallel ranks in dimension 1"):
            over.split(values(2, 5), 1)
    return found


@pytest.mark.long_where(num_ranks=[3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_are_taken_in_the_order_of_ranks_and_rounded_once(ranks, num_ranks, dtype):
    for found in ranks(num_ranks, exchanged, dtype):
        for got, want in found:
            assert got.dtype == want.dtype == dtype
            assert torch.equal(got, want)
