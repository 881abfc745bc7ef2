"""The DataLoader that initialize builds from a Dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class EpochLoader(DataLoader[Any]):
    """A DataLoader over this rank's part of a dataset; each new iteration is a new epoch."""

    num_epochs: int = 0
    """Epochs that were begun."""

    @staticmethod
    def over(
        dataset: Dataset[Any],
        batch_size: int,
        rank: int,
        num_ranks: int,
        collate_fn: Callable[..., Any] | None,
    ) -> EpochLoader:
        """Batches of `batch_size` samples per rank, shuffled anew in every epoch, alike on all ranks."""
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=num_ranks, rank=rank, shuffle=True
        )
        return EpochLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        assert isinstance(self.sampler, DistributedSampler), "made in `over`"
        self.sampler.set_epoch(self.num_epochs)
        self.num_epochs += 1
        return super().__iter__()
