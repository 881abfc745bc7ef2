"""A loader of the user that gives all data-parallel ranks the same samples is warned of."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import zeroshard
from zeroshard.data.loader import warn_of_same_samples

DATA = TensorDataset(torch.arange(8.0)[:, None])


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter(DATA)


class Shares(BatchSampler):
    """A batch sampler of another library, which may divide batches among ranks."""


def stateful(*args, **kwargs):
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(*args, **kwargs)


WITH_ALL = {
    "in order": lambda: DataLoader(DATA, batch_size=2),
    "shuffled": lambda: DataLoader(DATA, batch_size=2, shuffle=True),
    "single samples": lambda: DataLoader(DATA, batch_size=None),
    "stateful, shuffled": lambda: stateful(DATA, batch_size=2, shuffle=True),
}
WITH_A_PART = {
    "distributed": lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)),
    "distributed, stateful": lambda: stateful(DATA, sampler=DistributedSampler(DATA, 2, 0)),
    "batches divided": lambda: DataLoader(DATA, batch_sampler=Shares(SequentialSampler(DATA), 2, False)),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "of no library": lambda: [torch.zeros(2, 1)],
}


@pytest.mark.parametrize("kind", WITH_ALL)
def test_a_loader_that_takes_all_samples_on_each_rank_is_warned_of(kind):
    loader = WITH_ALL[kind]()
    with pytest.warns(UserWarning, match="takes all samples of its dataset on each of 2 data-parallel ranks"):
        warn_of_same_samples(loader, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_same_samples(loader, 1)


@pytest.mark.parametrize("kind", WITH_A_PART)
def test_a_loader_whose_samples_may_be_divided_is_not_warned_of(kind):
    loader = WITH_A_PART[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_same_samples(loader, 2)


def warnings_of_start():
    model = nn.Linear(1, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zeroshard.initialize(model, None, {}, training_data=stateful(DATA, batch_size=2)).engine.close()
    return [(str(one.message), one.filename) for one in caught if "all samples" in str(one.message)]


def test_one_of_the_ranks_warns_where_initialize_was_called(ranks):
    (said,), others = ranks(2, warnings_of_start)
    assert said[0].startswith(
        "training_data: the SequentialSampler of this StatefulDataLoader takes all samples"
    )
    assert said[1] == __file__
    assert others == []
