"""The DataLoader of initialize: what each rank takes in an epoch, and where it is resumed."""

import itertools
import math
import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils.data import DataLoader, DistributedSampler

from zeroshard.data.loader import EpochLoader, order, turns

LENGTHS = st.integers(1, 40)
NUM_RANKS = st.integers(1, 9)
BATCH_SIZES = st.integers(1, 5)


def loader(length, batch_size=1, rank=0, num_ranks=1, **options):
    options = {"num_ranks": num_ranks, "batch_size": batch_size, "collate_fn": torch.tensor} | options
    return EpochLoader(list(range(length)), rank=rank, **options)


def loaders(length, batch_size, num_ranks):
    """Those of all ranks."""
    return [loader(length, batch_size, rank, num_ranks) for rank in range(num_ranks)]


def batches_of(loader, num_batches=None):
    return [batch.tolist() for batch in itertools.islice(loader, num_batches)]


def samples_of(loader, num_batches=None):
    return [sample for batch in batches_of(loader, num_batches) for sample in batch]


def torch_sampler(length, rank, num_ranks, epoch, seed=0):
    """What the ranks are compared with."""
    sampler = DistributedSampler(range(length), num_ranks, rank, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def torch_order(length, epoch, seed=0):
    """All samples of an epoch as the ranks together take them."""
    return torch_sampler(length, 0, 1, epoch, seed)


def filled_up(samples, rank, num_ranks, whole):
    """What a rank takes of `samples`, which the start of `whole` makes divisible, as lists."""
    size = math.ceil(len(samples) / num_ranks) * num_ranks
    return [*samples, *itertools.islice(itertools.cycle(whole), size - len(samples))][rank::num_ranks]


# ------------------------------------------------------------------------------------------------- epochs


@given(LENGTHS, NUM_RANKS, st.integers(0, 2**40), st.integers(0, 2**20), st.data())
def test_order_and_turns_are_those_of_torchs_distributed_sampler(length, num_ranks, seed, epoch, data):
    rank = data.draw(st.integers(0, num_ranks - 1))
    taken = order(length, seed + epoch)[turns(length, 0, rank, num_ranks)]
    assert taken.tolist() == torch_sampler(length, rank, num_ranks, epoch, seed)


def test_a_loop_that_was_left_is_followed_by_a_new_epoch():
    ours = loader(6)
    next(iter(ours))
    assert samples_of(ours) == torch_order(6, epoch=1)
    assert ours.num_epochs == 2


def test_a_batch_that_cannot_be_loaded_is_passed_by():
    class Broken(list):
        def __getitem__(self, index):
            if index == torch_order(6, epoch=0)[2]:
                raise OSError("unreadable")
            return index

    ours = EpochLoader(Broken(range(6)), rank=0, num_ranks=1, batch_size=1, collate_fn=torch.tensor)
    batches = iter(ours)
    assert [next(batches).item(), next(batches).item()] == torch_order(6, epoch=0)[:2]
    with pytest.raises(OSError, match="unreadable"):
        next(batches)
    assert ours.state_dict()["position"] == 2  # so that a run that ends here tries it again
    assert next(batches).item() == torch_order(6, epoch=0)[3]
    assert ours.state_dict()["position"] == 4


# ----------------------------------------------------------------------------------------------- resuming


@given(LENGTHS, st.lists(st.tuples(NUM_RANKS, BATCH_SIZES, st.integers(0, 4)), max_size=5), st.data())
def test_an_epoch_cut_at_any_batches_and_continued_in_other_layouts_takes_every_sample_once(
    length, layouts, data
):
    layouts.append((data.draw(NUM_RANKS), data.draw(BATCH_SIZES), None))  # to the end
    whole = torch_order(length, epoch=0)
    state, taken = loader(length).state_dict(), []
    for num_ranks, batch_size, num_batches in layouts:
        if len(taken) >= length:
            break
        of_ranks = []
        rest = whole[len(taken) :]
        for rank, ours in enumerate(loaders(length, batch_size, num_ranks)):
            ours.load_state_dict(state)
            of_ranks.append(samples_of(ours, num_batches))
            want = filled_up(rest, rank, num_ranks, whole)
            assert of_ranks[-1] == want[: None if num_batches is None else num_batches * batch_size]
            after = ours.state_dict()
        state = after
        taken += [sample for turn in zip(*of_ranks, strict=True) for sample in turn]
        assert state["position"] == min(length, len(taken))
        assert len(taken) < length + num_ranks
    assert taken[:length] == whole


def test_an_epoch_whose_smaller_last_batch_is_dropped_is_over_when_it_is_resumed():
    first, resumed = (loader(11, 2, num_ranks=2, drop_last=True) for _ in range(2))
    assert len(list(first)) == 3
    resumed.load_state_dict(first.state_dict())
    assert resumed.num_epochs == 1
    assert batches_of(resumed) == batches_of(first)


def test_the_seed_of_the_saved_order_is_kept():
    ours = loader(10)
    ours.load_state_dict({"epoch": 3, "position": 4, "seed": 17, "num_samples": 10})
    assert samples_of(ours) == torch_order(10, epoch=3, seed=17)[4:]
    assert ours.state_dict()["seed"] == 17
    assert samples_of(ours) == torch_order(10, epoch=4, seed=17)


def test_beginning_an_epoch_draws_from_the_rng_what_torch_draws_and_resuming_it_nothing():
    ours = loader(6)
    torch.manual_seed(0)
    iter(DataLoader(range(6)))
    want = torch.get_rng_state()
    torch.manual_seed(0)
    next(iter(ours))
    assert torch.equal(torch.get_rng_state(), want)
    ours.load_state_dict(ours.state_dict())
    next(iter(ours))
    assert torch.equal(torch.get_rng_state(), want)


# ------------------------------------------------------------------------------------------------ workers


def test_what_workers_prefetched_does_not_count():
    options = {"batch_size": 2, "num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}
    ours = EpochLoader(list(range(20)), rank=1, num_ranks=2, **options)
    batches = iter(ours)
    assert ours.state_dict()["position"] == 0
    seen = next(batches).tolist() + next(batches).tolist()
    state = ours.state_dict()
    assert state["position"] == 8
    del batches
    ours.load_state_dict(state)
    seen += samples_of(ours)
    assert seen == torch_sampler(20, 1, 2, epoch=0)
    assert ours.state_dict()["position"] == 20
    assert samples_of(ours) == torch_sampler(20, 1, 2, epoch=1)


# ----------------------------------------------------------------------------------------- states refused


def test_for_a_dataset_of_another_length_a_warning_names_both_and_the_next_epoch_begins():
    ours = loader(9)
    with pytest.warns(UserWarning, match=r"expected 10 samples.*got 9.*start of epoch 4") as warned:
        ours.load_state_dict({"epoch": 3, "position": 10, "seed": 0, "num_samples": 10})
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert ours.state_dict() == {"epoch": 4, "position": 0, "seed": 0, "num_samples": 9}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.load_state_dict(ours.state_dict())
    assert samples_of(ours) == torch_order(9, epoch=4)


GOOD = {"epoch": 1, "position": 2, "seed": 0, "num_samples": 6}


@pytest.mark.parametrize(
    "state",
    [
        *(GOOD | {key: value} for key in GOOD for value in (-1, 1.0)),
        *({k: v for k, v in GOOD.items() if k != key} for key in GOOD),
        *(GOOD | wrong for wrong in ({"seed": 2**63}, {"epoch": True}, {"position": 7}, {"rank": 0})),
        *([1, 2, 0, 6], None),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(state):
    ours = loader(6)
    next(iter(ours))
    before = ours.state_dict()
    with pytest.raises(ValueError, match="state of the data"):
        ours.load_state_dict(state)
    assert ours.state_dict() == before
    assert samples_of(ours) == torch_order(6, epoch=1)
