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


TAKES_ALL = {
    "in order": (True, lambda: DataLoader(DATA, batch_size=2)),
    "shuffled": (True, lambda: DataLoader(DATA, batch_size=2, shuffle=True)),
    "single samples": (True, lambda: DataLoader(DATA, batch_size=None)),
    "stateful, shuffled": (True, lambda: stateful(DATA, batch_size=2, shuffle=True)),
    "distributed": (False, lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0))),
    "distributed, stateful": (False, lambda: stateful(DATA, sampler=DistributedSampler(DATA, 2, 0))),
    "divided": (False, lambda: DataLoader(DATA, batch_sampler=Shares(SequentialSampler(DATA), 2, False))),
    "stream": (False, lambda: DataLoader(Stream(), batch_size=2)),
    "of no library": (False, lambda: [torch.zeros(2, 1)]),
}


@pytest.mark.parametrize("kind", TAKES_ALL)
def test_only_a_loader_that_takes_all_samples_on_each_rank_is_warned_of(kind):
    takes_all, make = TAKES_ALL[kind]
    for num_ranks in (1, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_same_samples(make(), num_ranks)
        texts = [str(one.message) for one in caught if "training_data" in str(one.message)]
        assert len(texts) == (takes_all and num_ranks > 1)
        assert all("samples of its dataset on each of 2 data-parallel ranks" in text for text in texts)


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
