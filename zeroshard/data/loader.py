"""The DataLoader that initialize builds from a Dataset, and the position in the data at which it resumes.

In an epoch all ranks share one order of the samples, which they take turns in. A position counts the
samples that all ranks have consumed, so it means the same at any number of ranks and any batch size:

    order      a b c d e f g h i j k (a b)
    2 ranks    0 1 0 1                        one batch of 2 samples per rank, then position 4
    3 ranks            0 1 2 0 1 2 0 1 2      resumed; filled up from the start of the order

A loader of the user with `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader, finds
its place by its own state. A checkpoint has that of each data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import length_hint
from typing import Any

import torch
from torch import Generator, Tensor
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
        self._num_batches = 0

    def __next__(self) -> Any:
        # Without workers torch begins to iterate over the sampler as late as here, at the first batch.
        self._loader.sampler.begin_at(self._start)
        # Counted even if loading fails: a loop that goes on gets the next batch.
        self._num_batches += 1
        batch = next(self._batches)
        consumed = self._start.position + self._num_batches * self._batch_size
        self._data_position.position = min(consumed, len(self._loader.dataset))  # type: ignore[arg-type]
        return to_device(batch, self._loader.device)


# -------------------------------------------------------------------------------- a DataLoader of the user


_OF_ALL_SAMPLES = ("SequentialSampler", "RandomSampler", "BatchSampler")
"""Samplers of torch and torchdata that know nothing of ranks; each of the two has classes of its own."""


def is_loader(value: Any) -> bool:
    """True for what iterates and has a state without being a Dataset."""
    has_state = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    return isinstance(value, Iterable) and has_state and not isinstance(value, Dataset)


def _samplers_of(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is None:
        return [getattr(loader, "sampler", None)]
    return [batch_sampler, getattr(batch_sampler, "sampler", None)]


def _parts_of(loader: Any) -> tuple[Any, ...]:
    return loader, getattr(loader, "sampler", None), *_samplers_of(loader)


def refuse_generators(loader: Any) -> None:
    """Refuse a loader whose order a generator of its own draws: the state of that is not saved.

    Raises:
        ValueError: the loader or a sampler has one.
    """
    for part in _parts_of(loader):
        keeps_it = part is not loader and type(part).__module__.startswith("torchdata.")  # in its state
        if isinstance(getattr(part, "generator", None), Generator) and not keeps_it:
            raise ValueError(
                f"training_data: a {type(part).__name__} with a generator of its own would draw another "
                "order after a resume: leave it out, or give the loader a DistributedSampler with a seed"
            )


def warn_of_same_samples(loader: Any, num_ranks: int) -> None:
    """Warn if a loader over a Dataset takes all its samples on each of several data-parallel ranks."""
    samplers = _samplers_of(loader)
    kinds = [type(sampler) for sampler in samplers]
    known = [kind.__module__.partition(".")[0] in ("torch", "torchdata") for kind in kinds]
    if num_ranks > 1 and all(known) and all(kind.__name__ in _OF_ALL_SAMPLES for kind in kinds):
        warn_user(
            f"training_data: the {type(samplers[-1]).__name__} of this {type(loader).__name__} takes all "
            f"samples of its dataset on each of {num_ranks} data-parallel ranks: expected a "
            "DistributedSampler, unless each rank has a dataset of its own"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoaderPosition:
    """A place in the data of one rank."""

    epoch: Size
    is_over: bool = False
    """True if the iteration over the loader has ended: its state is one between two epochs."""
    length: int | None = None
    """Batches of the epoch, if the loader knows them."""
    random: Tensor | None = None
    """The state of torch's generator at the begin of the epoch; None before any epoch."""
    own: Any = None
    """The state of the loader itself."""

    @property
    def next_epoch(self) -> int:
        """The number of the epoch after."""
        return self.epoch + (self.random is not None)


class GivenLoader:
    """Iterates over a loader of the user and moves its batches; each iteration is an epoch.

    At the begin of an epoch its number goes to `set_epoch` of the loader, its samplers or its dataset, where
    they have one. Only the first iteration after `load_state_dict` goes on inside the epoch that was saved.

    Args:
        loader: an iterable over this rank's batches with a state.
        device: to which batches are moved.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader = loader
        self.device = device
        self._place = _LoaderPosition(epoch=0)
        """The place of the newest iteration, without the state of the loader."""
        self._resumed: _LoaderPosition | None = None
        """The place at which the next iteration goes on."""

    @property
    def num_epochs(self) -> int:
        """The number of epochs that were begun; an epoch to resume counts once it is resumed."""
        if self._resumed is not None:
            return self._resumed.epoch + self._resumed.is_over
        return self._place.next_epoch

    def __len__(self) -> int:
        """Return the batches of an epoch; TypeError if the loader does not know them."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.num_epochs
        resumed, self._resumed = self._resumed, None
        self._tell_epoch(epoch)
        if resumed is not None and resumed.own is not None:
            self.loader.load_state_dict(resumed.own)
        if resumed is None or resumed.is_over:
            place = _LoaderPosition(epoch=epoch, length=self._length(), random=torch.get_rng_state())
            batches: Iterator[Any] = iter(self.loader)
        else:
            place = resumed
            assert place.random is not None, "a place in an epoch has one"
            # Samplers of torch draw their order again; the random state of the checkpoint is later.
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(place.random)
                batches = iter(self.loader)
        self._place = place
        return self._moved(place, batches)

    def _moved(self, place: _LoaderPosition, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield to_device(batch, self.device)
        if self._place is place:  # no other iteration has begun
            self._place = replace(place, is_over=True)

    def _tell_epoch(self, epoch: int) -> None:
        for part in (*_parts_of(self.loader), getattr(self.loader, "dataset", None)):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def _length(self) -> int | None:
        """The batches of an epoch, if the loader knows them."""
        return length_hint(self.loader) or None

    # -- checkpoints ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the newest iteration on this rank.

        Batches that were handed out count; batches that workers have only prefetched do not.
        """
        place = self._resumed or self._place
        if self._resumed is None and place.random is not None:
            place = replace(place, own=self.loader.state_dict())
        return {field.name: getattr(place, field.name) for field in fields(place)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on at the place in `state`.

        If an epoch has another number of batches now, the place has no meaning: a warning says so, and the
        next iteration is the epoch after.

        Raises:
            ValueError: the state is not as `state_dict` makes it.
        """
        place, length = parse_place(state), self._length()
        if place.random is None:
            self._place, self._resumed = _LoaderPosition(epoch=place.epoch), None
        elif place.length != length:
            self._skip_to(place.next_epoch, f"epochs of {place.length} batches on this rank", f"{length}")
        else:
            self._resumed = place

    def load_states(self, states: Sequence[Mapping[str, Any]], rank: int, num_ranks: int) -> None:
        """Go on at the place of a rank, out of the places of all data-parallel ranks.

        At another number of ranks such a place has no meaning: a warning says so, and the next iteration is
        the epoch after. Without any places the loader stays where it is, also with a warning.
        """
        if len(states) == num_ranks:
            self.load_state_dict(states[rank])
        elif states:
            epoch = parse_place(states[0]).next_epoch
            self._skip_to(epoch, f"places of {len(states)} data-parallel ranks", f"{num_ranks}")
        else:
            warn_user("training_data: the checkpoint has no place of a loader: the data begin where they are")

    def _skip_to(self, epoch: int, saved: str, present: str) -> None:
        warn_user(
            f"training_data: the checkpoint has {saved}, and this run {present}; going on at the start of "
            f"epoch {epoch}. With a Dataset as training_data the place stays, at any number of "
            "ranks and batch size"
        )
        self._place, self._resumed = _LoaderPosition(epoch=epoch), None


def parse_place(state: Any) -> _LoaderPosition:
    """Return the place in a state. Raises an error if it is not as `GivenLoader.state_dict` makes it."""
    place: _LoaderPosition = typed(_LoaderPosition, state, "state of training_data")
    if place.random is not None:
        Generator().set_state(place.random)
    return place
