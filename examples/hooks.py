"""Two gradient hooks: QSGD and sketched SGD.

They have the form of torch's communication hooks, and need nothing of zeroshard:

    zeroshard.initialize(model, optimizer, {"stage": 1}, gradient_hook=(QSGD(), qsgd_hook))
    DistributedDataParallel(model).register_comm_hook(SketchedSGD(), sketched_hook)

Both average exactly in the first two backwards: after the first one DistributedDataParallel orders the
gradients in its buckets anew. It reads the annotations of hooks, so here they are no strings.
"""

import torch
import torch.distributed as dist
from torch import Tensor

FIRST = 2
"""Backwards with exact means."""
BLOCK = 256
"""The elements that share a norm in QSGD."""


def done(values: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future that has come."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(values)
    return future


def average(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the mean of the ranks' values, in place."""
    dist.all_reduce(values, group=group)
    return values.div_(dist.get_world_size(group))


# ---------------------------------------------------------------------------------------------------- QSGD


class QSGD:
    """The state of `qsgd_hook`.

    Args:
        group: all ranks; None for the default group.
        levels: s, up to 7. An element takes 4 bits, and each 256 elements a norm of 4 bytes.
        seed: of the random numbers, which differ between ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, levels: int = 7, seed: int = 0) -> None:
        if not 1 <= levels <= 7:
            raise ValueError(f"levels: expected 1 to 7, which fit into 4 bits with a sign, got {levels}")
        self.process_group, self.levels, self.seed, self.iter = group, levels, seed, 0

    def generator(self, index: int, device: torch.device) -> torch.Generator:
        """Return the random numbers of a bucket in this backward."""
        numbers = (self.seed, dist.get_rank(self.process_group), self.iter, index)
        return torch.Generator(device).manual_seed(hash(numbers) & (1 << 62) - 1)


def quantize(blocks: Tensor, levels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Round the elements of blocks to levels of their norm, up or down at random, without bias.

    Alistarh et al. 2017, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", section
    3.1. The mean of the result is the block v of n elements, and its variance at most
    min(n / s^2, sqrt(n) / s) |v|^2, lemma 3.1.

    Args:
        blocks: [blocks, n].
        levels: s.
        generator: the random numbers.

    Returns:
        Codes from -s to s, [blocks, n] int8, and norms, [blocks, 1].
    """
    norms = torch.linalg.vector_norm(blocks, dim=1, keepdim=True)
    scaled = blocks.abs() / norms.clamp(min=torch.finfo(blocks.dtype).tiny) * levels
    random = torch.rand(blocks.shape, generator=generator, device=blocks.device, dtype=blocks.dtype)
    return ((scaled + random).floor().clamp(max=levels) * blocks.sign()).to(torch.int8), norms


def dequantize(codes: Tensor, norms: Tensor, levels: int) -> Tensor:
    """Return the values that codes stand for."""
    return codes * (norms / levels)


def qsgd_hook(state: QSGD, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Send gradients with 4 bits an element, and return their mean."""
    flat, group = bucket.buffer(), state.process_group
    is_exact, generator = state.iter < FIRST, state.generator(bucket.index(), flat.device)
    state.iter += bucket.is_last()
    if is_exact:
        return done(average(flat, group))
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    codes, norms = quantize(blocks, state.levels, generator)
    halves = (codes + state.levels).to(torch.uint8)
    message = torch.cat([halves[:, ::2] << 4 | halves[:, 1::2], norms.view(torch.uint8)], dim=1)
    received = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, message, group=group)
    total = torch.zeros_like(blocks)
    for own in received:
        packed, norms = own[:, : BLOCK // 2], own[:, BLOCK // 2 :].contiguous().view(blocks.dtype)
        codes = torch.stack([packed >> 4, packed & 15], dim=2).flatten(1).to(torch.int8) - state.levels
        total += dequantize(codes, norms, state.levels)
    return done(total.view(-1)[: flat.numel()] / len(received))


# --------------------------------------------------------------------------------------------- sketched SGD


class SketchedSGD:
    """The state of `sketched_hook`.

    Args:
        group: all ranks; None for the default group.
        share: the share of elements that a backward moves.
        rows: the rows of the sketch; an odd number, of which the median is taken.
        columns: the columns, as a share of elements.
        candidates: the elements whose exact values are asked for, for each one that is moved.
        seed: of the hash functions, the same on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        share: float = 0.01,
        rows: int = 5,
        columns: float = 0.02,
        candidates: int = 4,
        seed: int = 0,
    ) -> None:
        self.process_group, self.share, self.rows, self.columns = group, share, rows, columns
        self.candidates, self.seed, self.iter = candidates, seed, 0
        self.errors: dict[int, Tensor] = {}
        """What was not moved so far, by the number of the bucket; each rank has its own."""


def hashes(num: int, rows: int, columns: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the column and the sign of each element in each row, [rows, num]: (a i + b) mod p."""
    prime, generator = (1 << 31) - 1, torch.Generator().manual_seed(seed)
    a, b, c, d = torch.randint(1, prime, (4, rows, 1), generator=generator).to(device)
    index = torch.arange(num, device=device)
    return (a * index + b) % prime % columns, ((c * index + d) % prime % 2) * 2 - 1


def sketch(values: Tensor, places: Tensor, signs: Tensor, columns: int) -> Tensor:
    """Return the count sketch of values, [rows, columns]: of sums, it is the sum of the sketches."""
    table = values.new_zeros(len(places), columns)
    return table.scatter_add_(1, places, signs * values)


def estimate(table: Tensor, places: Tensor, signs: Tensor) -> Tensor:
    """Return the values that a sketch says, [n]: the median of its rows."""
    return (table.gather(1, places) * signs).median(dim=0).values


def sketched_hook(state: SketchedSGD, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Move the largest elements of the mean; the others wait for a later backward.

    Ivkin et al. 2019, "Communication-efficient distributed SGD with sketching", algorithm 1: ranks add up
    their sketches, take the largest estimates for candidates, exchange the exact values of these in a second
    round, and move the largest ones of them. Here the momentum is the optimizer's.
    """
    flat, group, index = bucket.buffer(), state.process_group, bucket.index()
    is_exact, num = state.iter < FIRST, bucket.buffer().numel()
    state.iter += bucket.is_last()
    if is_exact:
        return done(average(flat, group))
    values = flat + state.errors[index] if index in state.errors else flat.clone()
    columns, most = max(1, round(state.columns * num)), max(1, round(state.share * num))
    places, signs = hashes(num, state.rows, columns, state.seed + index, flat.device)
    table = average(sketch(values, places, signs, columns), group)
    asked = estimate(table, places, signs).abs().topk(min(num, state.candidates * most)).indices
    exact = average(values[asked], group)
    largest = exact.abs().topk(most).indices
    values[asked[largest]] = 0
    state.errors[index] = values
    moved = torch.zeros_like(flat)
    moved[asked[largest]] = exact[largest]
    return done(moved)
