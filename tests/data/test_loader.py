"""The DataLoader of initialize: what each rank takes in an epoch, where it is resumed, and its device.

The meta device stands for an accelerator.
"""

import copy
import itertools
import math
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, DistributedSampler

from zeroshard.data.loader import EpochLoader, order, turns
from zeroshard.data.microbatch import to_device

LENGTHS = st.integers(1, 40)
NUM_RANKS = st.integers(1, 9)
BATCH_SIZES = st.integers(1, 5)


def loader(length, batch_size=1, rank=0, num_ranks=1, **options):
    options = {"num_ranks": num_ranks, "batch_size": batch_size, "collate_fn": torch.tensor} | options
    return EpochLoader(list(range(length)), rank=rank, **options)


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
def test_an_epoch_that_is_continued_in_other_layouts_takes_every_sample_once(length, layouts, data):
    layouts.append((data.draw(NUM_RANKS), data.draw(BATCH_SIZES), None))  # to the end
    whole = torch_order(length, epoch=0)
    state, taken = loader(length).state_dict(), []
    for num_ranks, batch_size, num_batches in layouts:
        if len(taken) >= length:
            break
        of_ranks, rest = [], whole[len(taken) :]
        for rank in range(num_ranks):
            ours = loader(length, batch_size, rank, num_ranks)
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


def test_a_malformed_state_is_refused_and_changes_nothing():
    good, ours = {"epoch": 1, "position": 2, "seed": 0, "num_samples": 6}, loader(6)
    next(iter(ours))
    before = ours.state_dict()
    for state in (
        *(good | {key: value} for key in good for value in (-1, 1.0)),
        *({k: v for k, v in good.items() if k != key} for key in good),
        *(good | wrong for wrong in ({"seed": 2**63}, {"epoch": True}, {"position": 7}, {"rank": 0})),
        *([1, 2, 0, 6], None),
    ):
        with pytest.raises(ValueError, match="state of the data"):
            ours.load_state_dict(state)
        assert ours.state_dict() == before
    assert samples_of(ours) == torch_order(6, epoch=1)


# --------------------------------------------------------------------------- batches on their way to a device


META, CPU = torch.device("meta"), torch.device("cpu")

Pair = namedtuple("Pair", "first second")


class Scaled(dict):
    scale = 1.0


def x():
    return torch.arange(6).view(2, 3)


def test_a_batch_on_a_device_has_the_types_and_shapes_of_the_batch():
    for batch, find in (
        (x(), lambda b: b),
        ((x(), 1, "a", None), lambda b: b[0]),
        ([x(), [x()]], lambda b: b[1][0]),
        (Pair(0, x()), lambda b: b.second),
        ({"a": {"b": (x(),)}}, lambda b: b["a"]["b"][0]),
        (OrderedDict(a=x()), lambda b: b["a"]),
        (defaultdict(list, a=x()), lambda b: b["a"]),
        (UserDict(a=x()), lambda b: b["a"]),
        (pack_sequence([torch.ones(3), torch.ones(2)]), lambda b: b.data),
    ):
        before, moved = find(batch), to_device(batch, META)
        assert type(moved) is type(batch)
        assert find(moved).device == META
        assert (find(moved).shape, find(moved).dtype) == (before.shape, before.dtype)
        assert find(batch) is before
        assert before.device == CPU


def test_what_is_no_tensor_is_handed_on():
    batch = (3, "text", None, object(), Scaled, {1, 2})
    assert to_device(batch, META) == batch
    scaled = Scaled(a=x())
    scaled.scale = 0.5
    assert to_device(scaled, META).scale == 0.5
    # torch reads the sizes of a packed sequence on the CPU.
    assert to_device(pack_sequence([torch.ones(2)]), META).batch_sizes.device == CPU
    lists = {"a": (x(), [x()])}
    before = copy.copy(lists)
    assert to_device(lists, CPU) is lists
    assert lists["a"][0] is before["a"][0]


def test_encodings_and_outputs_of_transformers_keep_their_types():
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": x()}, encoding=None, n_sequences=2)
    moved = to_device(encoding, META)
    assert type(moved) is transformers.BatchEncoding
    assert moved.input_ids.device == META
    assert moved.n_sequences == 2
    assert encoding.input_ids.device == CPU
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.ones(2))
    assert to_device(output, META).last_hidden_state.device == META
    assert output.last_hidden_state.device == CPU


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")  # there is no accelerator to pin for
def test_a_loader_hands_out_batches_on_its_device_and_counts_them_as_on_the_cpu():
    data = [(torch.tensor([float(i)]), i) for i in range(10)]
    on_cpu = EpochLoader(data, rank=1, num_ranks=2, batch_size=2)
    on_device = EpochLoader(data, rank=1, num_ranks=2, device=META, batch_size=2)
    assert (on_cpu.pin_memory, on_device.pin_memory) == (False, True)
    for batch, other in zip(on_cpu, on_device, strict=True):
        assert [t.device for t in batch] == [CPU, CPU]
        assert [t.device for t in other] == [META, META]
        assert on_cpu.state_dict() == on_device.state_dict()


@pytest.mark.gpu
def test_a_loader_of_a_gpu_pins_batches_and_hands_them_out_there():
    data = [(torch.tensor([float(i)]), i) for i in range(10)]
    loader = EpochLoader(data, rank=0, num_ranks=1, device=torch.device("cuda", 0), batch_size=2)
    wanted = EpochLoader(data, rank=0, num_ranks=1, batch_size=2)
    for batch, other in zip(loader, wanted, strict=True):
        assert all(value.is_cuda for value in batch)
        assert [value.tolist() for value in batch] == [value.tolist() for value in other]
