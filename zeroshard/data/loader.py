"""The DataLoader that initialize builds from a Dataset, and the position in the data at which it resumes.

In an epoch all ranks share one order of the samples, which they take turns in. A position counts the
samples that all ranks have consumed, so it means the same at any number of ranks and any batch size:

    order      a b c d e f g h i j k (a b)
    2 ranks    0 1 0 1                        one batch of 2 samples per rank, then position 4
    3 ranks            0 1 2 0 1 2 0 1 2      resumed; filled up from the start of the order
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from zeroshard.codec import Size, typed
from zeroshard.data.microbatch import to_device
from zeroshard.internals.warn import warn_user

_CPU = torch.device("cpu")


def order(num_samples: int, seed: int) -> Tensor:
    """Return the order in which all ranks together take the samples of an epoch: [num_samples], int64.

    Args:
        num_samples: the length of the dataset.
        seed: the seed of the data + the number of the epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_samples, generator=generator, device="cpu")


def turns(num_samples: int, position: int, rank: int, num_ranks: int) -> Tensor:
    """Return the indices in an epoch's order of the samples of one rank, from `position` to the end.

    All ranks take equally many. The last turn is filled up with samples from the start of the order.

    Returns:
        [num_turns], int64, on the CPU.
    """
    num_turns = -(-(num_samples - position) // num_ranks)
    return (position + rank + num_ranks * torch.arange(num_turns, device="cpu")) % num_samples


@dataclass(slots=True, kw_only=True)
class DataPosition:
    """A position in the data, the same on all ranks.

    Raises:
        ValueError: the position is behind the end.
    """

    epoch: Size
    position: Size
    """Samples of the epoch that were consumed, over all ranks and without what was filled up."""
    seed: Size
    num_samples: Size
    """The length of the dataset."""

    def __post_init__(self) -> None:
        if self.position > self.num_samples:
            raise ValueError(f"expected a position of at most {self.num_samples}, got {self.position}")


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler, shuffling, that can begin inside an epoch."""

    position: int = 0

    def begin_at(self, data_position: DataPosition) -> None:
        """Let the next iteration go from a position to the end of its epoch."""
        self.set_epoch(data_position.epoch)
        self.seed = data_position.seed
        self.position = data_position.position

    def __iter__(self) -> Iterator[int]:
        num_samples = len(self.dataset)  # type: ignore[arg-type]
        samples = order(num_samples, self.seed + self.epoch)
        return iter(samples[turns(num_samples, self.position, self.rank, self.num_replicas)].tolist())


class EpochLoader(DataLoader[Any]):
    """A DataLoader over this rank's part of a dataset; each new iteration is a new epoch.

    Only the first iteration after `load_state_dict` goes on inside the epoch that was saved.

    Args:
        dataset: an object with a length that gives samples by index.
        rank: this rank among those that share the dataset.
        num_ranks: the number of these ranks.
        device: to which batches are moved.
        options: of DataLoader, except for those about which samples make a batch. Without `pin_memory`, or
            with None, batches for an accelerator are collated in pinned memory.
    """

    sampler: EpochSampler

    def __init__(
        self, dataset: Dataset[Any], *, rank: int, num_ranks: int, device: torch.device = _CPU, **options: Any
    ) -> None:
        sampler = EpochSampler(dataset, num_replicas=num_ranks, rank=rank)
        if options.get("pin_memory") is None:
            options["pin_memory"] = device.type != "cpu"
        super().__init__(dataset, sampler=sampler, **options)
        self.device = device
        self._data_position = DataPosition(epoch=0, position=0, seed=0, num_samples=len(dataset))  # type: ignore[arg-type]
        """The position of the newest iteration."""
        self._next_start = self._data_position

    @property
    def num_epochs(self) -> int:
        """The number of epochs that were begun; an epoch to resume counts once it is resumed."""
        return self._next_start.epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        assert self.batch_size is not None, "EpochLoader counts in batches"
        data_position = self._present(self._next_start)
        self.sampler.begin_at(data_position)
        # An epoch begins with torch drawing a seed for workers. RNG states that were saved inside the epoch
        # are those after that draw, so resuming it must not draw again.
        with torch.random.fork_rng(devices=[], enabled=data_position.position > 0):
            batches = super().__iter__()
        self._data_position = data_position
        self._next_start = replace(data_position, epoch=data_position.epoch + 1, position=0)
        return _EpochIterator(self, batches, data_position, self.batch_size * self.sampler.num_replicas)

    def state_dict(self) -> dict[str, int]:
        """Return the position of the newest iteration, as numbers that JSON can hold.

        Batches that were handed out count; batches that workers have only prefetched do not. The state is
        equal on all ranks that were handed equally many batches.
        """
        return asdict(self._present(self._data_position))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration continue at the position in `state`.

        The number of ranks and the batch size may be others. If the length of the dataset has changed, the
        position has no meaning: a warning says so, and the next iteration is the epoch after.

        Raises:
            ValueError: the state is not as `state_dict` makes it.
        """
        data_position: DataPosition = typed(DataPosition, state, "state of the data")
        num_samples = len(self.dataset)  # type: ignore[arg-type]
        following = replace(data_position, epoch=data_position.epoch + 1, position=0, num_samples=num_samples)
        if data_position.num_samples != num_samples:
            warn_user(
                f"training_data: expected {data_position.num_samples} samples, as when the state was saved, "
                f"got {num_samples}; going on at the start of epoch {following.epoch}, "
                f"not inside epoch {data_position.epoch}"
            )
            data_position = following
        left = turns(num_samples, data_position.position, 0, self.sampler.num_replicas)
        is_over = len(left) < (self.batch_size or 1 if self.drop_last else 1)
        self._data_position = data_position
        self._next_start = following if is_over else data_position

    def _present(self, data_position: DataPosition) -> DataPosition:
        """A position with the present number of samples: a dataset may grow."""
        num_samples = max(len(self.dataset), data_position.position)  # type: ignore[arg-type]
        return replace(data_position, num_samples=num_samples)


class _EpochIterator(Iterator[Any]):
    """The batches from a position to the end of its epoch; the position moves as they are handed out."""

    def __init__(
        self, loader: EpochLoader, batches: Iterator[Any], data_position: DataPosition, batch_size: int
    ) -> None:
        self._loader, self._batches, self._data_position = loader, batches, data_position
        self._start, self._batch_size = replace(data_position), batch_size  # over all ranks
        self._consumed = data_position.position

    def __next__(self) -> Any:
        # Without workers torch begins to iterate over the sampler as late as here, at the first batch.
        self._loader.sampler.begin_at(self._start)
        # Counted even if loading fails: a loop that goes on gets the next batch.
        self._consumed += self._batch_size
        batch = next(self._batches)
        self._data_position.position = min(self._consumed, len(self._loader.dataset))  # type: ignore[arg-type]
        return to_device(batch, self._loader.device)
