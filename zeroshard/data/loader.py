"""The DataLoader that initialize builds from a Dataset, and the place in the data where it is resumed.

In an epoch all ranks share one order of the samples, which they take turns in. A position counts the
samples that were consumed over all ranks, so it means the same at any number of ranks and any batch size:

    order      a b c d e f g h i j k (a b)
    2 ranks    0 1 0 1                        one batch of 2 samples per rank, then position 4
    3 ranks            0 1 2 0 1 2 0 1 2      resumed; filled up from the start of the order
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from zeroshard.config.sections import Loader
from zeroshard.data.microbatch import to_device

STATE_KEYS = ("epoch", "position", "seed", "num_samples")
_CPU = torch.device("cpu")
_DEFAULTS = Loader()
LIMIT = 2**63
"""Of the numbers in a state: torch.Generator takes a seed + epoch below twice this."""


def order(num_samples: int, seed: int) -> Tensor:
    """The samples of an epoch as all ranks together take them; `seed` is that of the data + the epoch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_samples, generator=generator, device="cpu")


def turns(num_samples: int, position: int, rank: int, num_ranks: int) -> Tensor:
    """Where in an epoch's order a rank takes its samples, from `position` to the end.

    All ranks take equally many. What is missing for that is taken from the start of the order again.
    """
    num_turns = -(-(num_samples - position) // num_ranks)
    return (position + rank + num_ranks * torch.arange(num_turns, device="cpu")) % num_samples


@dataclass(slots=True, kw_only=True)
class Place:
    """A place in the data, the same on all ranks."""

    epoch: int = 0
    position: int = 0
    """Samples of the epoch that were consumed, over all ranks and without what was filled up."""
    seed: int = 0


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler, shuffling, that can begin inside an epoch."""

    position: int = 0

    def begin_at(self, place: Place) -> None:
        """Let the next iteration go from `place` to the end of its epoch."""
        self.set_epoch(place.epoch)
        self.seed = place.seed
        self.position = place.position

    def __iter__(self) -> Iterator[int]:
        num_samples = len(self.dataset)  # type: ignore[arg-type]
        samples = order(num_samples, self.seed + self.epoch)
        return iter(samples[turns(num_samples, self.position, self.rank, self.num_replicas)].tolist())


class EpochLoader(DataLoader[Any]):
    """A DataLoader over this rank's part of a dataset; each new iteration is a new epoch.

    Only the first iteration after `load_state_dict` goes on inside the epoch that was saved.

    Args:
        dataset: what has a length and gives samples by index.
        rank: this rank among those that share the dataset.
        num_ranks: how many they are.
        device: where batches are handed out. For an accelerator they are collated in pinned memory.
        options: of DataLoader, except for those about which samples make a batch.
    """

    sampler: EpochSampler

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        rank: int,
        num_ranks: int,
        device: torch.device = _CPU,
        **options: Any,
    ) -> None:
        sampler = EpochSampler(dataset, num_replicas=num_ranks, rank=rank)
        super().__init__(dataset, sampler=sampler, **{"pin_memory": device.type != "cpu"} | options)
        self.device = device
        self._place = Place()
        """Of the newest iteration."""
        self._next_start = self._place

    @staticmethod
    def over(
        dataset: Dataset[Any],
        batch_size: int,
        rank: int,
        num_ranks: int,
        collate_fn: Callable[..., Any] | None,
        device: torch.device = _CPU,
        config: Loader = _DEFAULTS,
    ) -> EpochLoader:
        """Batches of `batch_size` samples per rank, shuffled anew in every epoch, alike on all ranks."""
        return EpochLoader(
            dataset,
            rank=rank,
            num_ranks=num_ranks,
            device=device,
            batch_size=batch_size,
            collate_fn=collate_fn,
            num_workers=config.num_workers,
            pin_memory=device.type != "cpu" if config.pin_memory is None else config.pin_memory,
            drop_last=config.drop_last,
        )

    @property
    def num_epochs(self) -> int:
        """Epochs that were begun; one that is to be resumed counts when it is."""
        return self._next_start.epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        assert self.batch_size is not None, "EpochLoader counts in batches"
        place = self._next_start
        self.sampler.begin_at(place)
        # An epoch begins with torch drawing a seed for workers. RNG states that were saved inside the epoch
        # are those after that draw, so resuming it must not draw again.
        with torch.random.fork_rng(devices=[], enabled=place.position > 0):
            batches = super().__iter__()
        self._place = place
        self._next_start = replace(place, epoch=place.epoch + 1, position=0)
        batch_size = self.batch_size * self.sampler.num_replicas
        return _Batches(batches, self.sampler, place, batch_size, self.device)

    def state_dict(self) -> dict[str, int]:
        """Where the newest iteration is: what it handed out counts, what workers prefetched does not.

        Equal on all ranks that were handed equally many batches; JSON can hold it.
        """
        place = self._place
        return {
            "epoch": place.epoch,
            "position": place.position,
            "seed": place.seed,
            "num_samples": len(self.dataset),  # type: ignore[arg-type]
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration go on where `state` was taken, be it at other batches on other ranks.

        If the dataset's length has changed, that place means nothing any more: warns, and the next
        iteration is the epoch after.

        Raises:
            ValueError: the state is not as `state_dict` makes it.
        """
        place, num_saved = parse_place(state)
        num_samples = len(self.dataset)  # type: ignore[arg-type]
        following = replace(place, epoch=place.epoch + 1, position=0)
        if num_saved != num_samples:
            warnings.warn(
                f"training_data: expected {num_saved} samples, as when the state was saved, "
                f"got {num_samples}; going on at the start of epoch {following.epoch}, "
                f"not inside epoch {place.epoch}",
                stacklevel=2,
            )
            place = following
        self._place = place
        self._next_start = following if self._is_over(place) else place

    def _is_over(self, place: Place) -> bool:
        """True when no batch of the epoch is left behind a place."""
        num_samples, num_ranks = len(self.dataset), self.sampler.num_replicas  # type: ignore[arg-type]
        num_turns = -(-(num_samples - place.position) // num_ranks)
        assert self.batch_size is not None, "EpochLoader counts in batches"
        return num_turns < (self.batch_size if self.drop_last else 1)


class _Batches(Iterator[Any]):
    """The batches from a place to the end of its epoch; moves the place as they are handed out."""

    def __init__(
        self,
        batches: Iterator[Any],
        sampler: EpochSampler,
        place: Place,
        batch_size: int,
        device: torch.device,
    ) -> None:
        self._batches, self._device = batches, device
        self._sampler = sampler
        self._place = place
        self._start = replace(place)
        self._batch_size = batch_size  # over all ranks
        self._num_batches = 0
        self._num_samples = len(sampler.dataset)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        # Without workers torch begins to iterate over the sampler as late as here, at the first batch.
        self._sampler.begin_at(self._start)
        # Counted even if loading fails: whoever goes on after that gets the batch behind it.
        self._num_batches += 1
        batch = next(self._batches)
        consumed = self._start.position + self._num_batches * self._batch_size
        self._place.position = min(consumed, self._num_samples)
        return to_device(batch, self._device)


def parse_place(state: Mapping[str, int]) -> tuple[Place, int]:
    """The place in a state and the length of the dataset it is about, checked."""
    if not isinstance(state, Mapping):
        raise ValueError(f"expected a state of the data as a dict of {', '.join(STATE_KEYS)}, got {state!r}")
    for key in STATE_KEYS:
        if key not in state:
            raise ValueError(f"state of the data: {key}: expected an integer, got nothing")
        value = state[key]
        if type(value) is not int or not 0 <= value < LIMIT:
            raise ValueError(f"state of the data: {key}: expected an integer in [0, 2**63), got {value!r}")
    for key in state:
        if key not in STATE_KEYS:
            raise ValueError(f"state of the data: {key}: expected only {', '.join(STATE_KEYS)}, got {key!r}")
    if state["position"] > state["num_samples"]:
        raise ValueError(
            f"state of the data: position: expected at most num_samples, {state['num_samples']}, "
            f"got {state['position']}"
        )
    place = Place(epoch=state["epoch"], position=state["position"], seed=state["seed"])
    return place, state["num_samples"]
