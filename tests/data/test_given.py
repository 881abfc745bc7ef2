"""A DataLoader of the user as training data: its place is in checkpoints, on any kind of loader."""

import functools
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

import zeroshard
from tests.ranks import on_ranks
from zeroshard.data.loader import GivenLoader, refuse_generators, warn_of_same_samples

CPU = torch.device("cpu")


class Numbers(Dataset):
    """Samples [1] with their own number; noisy ones draw from torch's generator."""

    def __init__(self, length, noisy=False):
        self.length, self.noisy = length, noisy

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        noise = torch.rand(()) if self.noisy else 0.0
        return torch.tensor([index + noise])


class Stream(IterableDataset):
    """Eleven samples in order, without a length."""

    def __iter__(self):
        return iter(torch.arange(11.0).unbind())


class Counted:
    """A loader of no library: it counts to seven from wherever its state says."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 7:
            self.at += 1
            yield torch.tensor([float(self.at)])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def stateful(*args, **kwargs):
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(*args, **kwargs)


def with_sampler(kind, rank=0, num_ranks=2):
    data = Numbers(22)
    return kind(data, batch_size=2, sampler=DistributedSampler(data, num_ranks, rank, shuffle=True, seed=3))


LOADERS = {
    "counted": Counted,
    "stateful": lambda: stateful(Numbers(11), batch_size=2),
    "stateful, shuffled": lambda: stateful(Numbers(11), batch_size=2, shuffle=True),
    "stateful, distributed": lambda: with_sampler(stateful),
    "stateful stream": lambda: stateful(Stream(), batch_size=2),
    "stateful, workers": lambda: stateful(Numbers(11), batch_size=2, shuffle=True, num_workers=2),
}


def run(given, num_batches):
    """The next batches, over epochs, and a number drawn after each, as dropout draws them."""
    batches = itertools.chain.from_iterable(itertools.repeat(given))
    return [
        (given.num_epochs, batch.flatten().tolist(), torch.rand(()).item())
        for batch in itertools.islice(batches, num_batches)
    ]


SEEDED = ("stateful, shuffled", "stateful, workers")
"""Loaders whose sampler has drawn its seed when it was made, which is before any place."""
WORKERS = [name for name in LOADERS if "workers" in name]


@pytest.mark.long_where(name=WORKERS)
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_loader_goes_on_with_the_batches_that_would_have_come(name):
    stops = (3,) if name in WORKERS else range(0, 15, 2)
    for stop in stops:
        torch.manual_seed(7)
        whole = run(GivenLoader(LOADERS[name](), CPU), stop + 8)
        torch.manual_seed(7)
        first = GivenLoader(LOADERS[name](), CPU)
        assert run(first, stop) == whole[:stop]
        state, random = first.state_dict(), torch.get_rng_state()
        torch.manual_seed(8)
        resumed = GivenLoader(LOADERS[name](), CPU)
        resumed.load_state_dict(state)
        torch.set_rng_state(random)  # as load_checkpoint does
        if name in SEEDED and stop == 0:
            continue
        going_on = run(resumed, 8)
        if name == "stateful stream":  # torch's numbers between epochs are not part of its state
            going_on, whole = [[row[:2] for row in rows] for rows in (going_on, whole)]
        assert going_on == whole[stop:], stop


class OfEpochs(Counted):
    """Notes the epochs that it is told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def set_epoch(self, number):
        self.told.append(number)


def test_a_place_between_two_epochs_goes_on_with_the_next_one():
    first = GivenLoader(OfEpochs(), CPU)
    assert [len(list(first)) for _ in range(2)] == [7, 7]
    resumed = GivenLoader(OfEpochs(), CPU)
    resumed.load_state_dict(first.state_dict())
    assert resumed.num_epochs == 2
    assert len(list(resumed)) == 7
    assert resumed.loader.told == [2]
    shuffled = LOADERS["stateful, shuffled"]
    torch.manual_seed(7)
    whole = GivenLoader(shuffled(), CPU)
    epochs = [[batch.tolist() for batch in whole] for _ in range(4)]
    torch.manual_seed(7)
    first = GivenLoader(shuffled(), CPU)
    assert [[batch.tolist() for batch in first] for _ in range(2)] == epochs[:2]
    random = torch.get_rng_state()
    resumed = GivenLoader(shuffled(), CPU)
    resumed.load_state_dict(first.state_dict())
    torch.set_rng_state(random)
    assert [[batch.tolist() for batch in resumed] for _ in range(2)] == epochs[2:]


def test_a_loop_that_leaves_an_epoch_early_begins_the_next_one():
    given = GivenLoader(with_sampler(stateful), CPU)
    epochs = [[batch.flatten().tolist() for batch in itertools.islice(given, 2)] for _ in range(2)]
    assert given.num_epochs == 2
    whole = GivenLoader(with_sampler(stateful), CPU)
    assert epochs == [[batch.flatten().tolist() for batch in whole][:2] for _ in range(2)]


def test_another_length_begins_the_next_epoch_with_a_warning():
    first = GivenLoader(with_sampler(stateful), CPU)
    run(first, 2)
    shorter = GivenLoader(stateful(Numbers(6), batch_size=2), CPU)
    with pytest.warns(
        UserWarning, match=r"has epochs of 6 batches .* this run 3; going on at the start of epoch 1"
    ):
        shorter.load_state_dict(first.state_dict())
    assert shorter.num_epochs == 1
    assert len(list(shorter)) == 3


def test_a_damaged_state_is_refused():
    given = GivenLoader(Counted(), CPU)
    run(given, 1)
    sound = given.state_dict()
    for key, value in (("epoch", -1), ("length", "7"), ("is_over", 0), ("random", 3), ("more", 1)):
        with pytest.raises(ValueError, match="state of training_data"):
            given.load_state_dict(sound | {key: value})


# ------------------------------------------------------------------------------------------- in checkpoints


def start(training_data):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return zeroshard.initialize(model, optimizer, {"stage": 3}, training_data=training_data)


def forever(made):
    return itertools.chain.from_iterable(itertools.repeat(made.dataloader))


def train(made, batches, num_steps):
    losses = []
    for batch in itertools.islice(batches, num_steps):
        loss = F.mse_loss(made.engine(batch / 22), batch)
        made.engine.backward(loss)
        made.engine.step()
        losses.append((batch.flatten().tolist(), loss.item()))
    return losses


def own(kind):
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if kind == "workers":
        return with_sampler(functools.partial(stateful, num_workers=2), rank, num_ranks)
    return with_sampler(stateful, rank, num_ranks)


def stop_and_resume(kind, folder, stop):
    whole = start(own(kind))
    batches = forever(whole)
    losses = train(whole, batches, stop)
    whole.engine.save_checkpoint(folder)
    losses += train(whole, batches, 8)
    whole.engine.close()
    resumed = start(own(kind))
    resumed.engine.load_checkpoint(folder)
    return losses[stop:], train(resumed, forever(resumed), 8)


@pytest.mark.long_where(kind=["workers"])
@pytest.mark.long_where(stop=[6])
@pytest.mark.parametrize("stop", [4, 6])
@pytest.mark.parametrize("kind", ["stateful", "workers"])
def test_a_run_over_a_loader_of_the_user_goes_on_to_the_bit(ranks, tmp_path, kind, stop):
    pytest.importorskip("torchdata")
    (first, resumed), (other, resumed_other) = ranks(2, stop_and_resume, kind, str(tmp_path), stop)
    assert resumed == first
    assert resumed_other == other
    assert first != other


def at_other_ranks(folder, save):
    made = start(own("stateful"))
    if save:
        train(made, forever(made), 2)
        made.engine.save_checkpoint(folder)
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.engine.load_checkpoint(folder)
    return [
        str(each.message) for each in caught if "training_data" in str(each.message)
    ], made.dataloader.num_epochs


def test_at_another_number_of_ranks_the_next_epoch_begins(ranks, tmp_path):
    ranks(2, at_other_ranks, str(tmp_path), True)
    ((said,), num_epochs) = ranks(1, at_other_ranks, str(tmp_path), False)[0]
    assert said.startswith("training_data: the checkpoint has places of 2 data-parallel ranks")
    assert num_epochs == 1


@on_ranks(1)
def test_a_place_in_a_dataloader_is_none_in_a_dataset_and_the_other_way(tmp_path):
    for saved, said in (
        (lambda: own("stateful"), "expected a DataLoader, .* got a Dataset; the data begin where they are"),
        (
            lambda: Numbers(8),
            "the checkpoint has no place of a loader: the data begin where they are",
        ),
    ):
        made = start(saved())
        train(made, forever(made), 2)
        made.engine.save_checkpoint(tmp_path)
        made.engine.close()
        made = start(Numbers(8) if "Dataset" in said else own("stateful"))
        with pytest.warns(UserWarning, match=said):
            made.engine.load_checkpoint(tmp_path)
        assert made.dataloader.num_epochs == 0
        assert len(list(made.dataloader)) in (8, 11)


@pytest.mark.parametrize("kind", ["generator", "iterator of a DataLoader", "DataLoader"])
def test_an_iterator_and_a_loader_without_a_state_are_no_training_data(kind):
    loader = DataLoader(Numbers(4))
    data = {"generator": (number for number in range(3)), "DataLoader": loader}.get(kind, iter(loader))
    with pytest.raises(
        ValueError, match=r"^training_data: expected a Dataset .*, or a loader with a state_dict\(\).* got <"
    ):
        zeroshard.initialize(nn.Linear(1, 1), None, {}, training_data=data)


def test_a_generator_of_the_loader_or_its_sampler_is_refused():
    generator, data = torch.Generator(), Numbers(4)
    sampler = RandomSampler(data, generator=generator)
    for options in (
        {"shuffle": True, "generator": generator},
        {"sampler": sampler},
        {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)},
    ):
        with pytest.raises(ValueError, match="with a generator of its own would draw another order"):
            zeroshard.initialize(nn.Linear(1, 1), None, {}, training_data=stateful(data, **options))
    refuse_generators(stateful(data, shuffle=True))


class Unsaved(Counted):
    def state_dict(self):
        return {"at": object()}


def save_unsaved(folder):
    made = start(Unsaved())
    train(made, forever(made), 1)
    with pytest.raises(
        ValueError, match=r"state of training_data\['own'\]\['at'\]: expected tensors"
    ) as caught:
        made.engine.save_checkpoint(folder)
    return str(caught.value)


def test_a_state_that_would_need_code_to_load_is_refused_on_all_ranks(ranks, tmp_path):
    assert all("got builtins.object" in said for said in ranks(2, save_unsaved, str(tmp_path)))


@pytest.mark.parametrize(
    ("config", "options"),
    [({"micro_batch_size": 4}, {}), ({"loader": {"num_workers": 1}}, {}), ({}, {"collate_fn": list})],
)
def test_settings_that_the_loader_of_the_user_would_not_follow_are_refused(config, options):
    loader = stateful(Numbers(4), batch_size=2)
    with pytest.raises(ValueError, match="expected them in the arguments of your DataLoader"):
        zeroshard.initialize(nn.Linear(1, 1), None, config, training_data=loader, **options)


def test_a_pipeline_needs_a_dataset():
    loader = stateful(Numbers(4), batch_size=2)
    with pytest.raises(
        ValueError, match=r"^training_data: got a StatefulDataLoader with mesh\.pp=2: expected a Dataset"
    ):
        zeroshard.initialize(nn.Linear(1, 1), None, {"mesh": {"pp": 2}}, training_data=loader)


# ------------------------------------------------------- the same samples on all ranks

TAKEN = Numbers(8)


class Shares(BatchSampler):
    """A batch sampler of another library, which may divide batches among ranks."""


TAKES_ALL = {
    "in order": (True, lambda: DataLoader(TAKEN, batch_size=2)),
    "shuffled": (True, lambda: DataLoader(TAKEN, batch_size=2, shuffle=True)),
    "single samples": (True, lambda: DataLoader(TAKEN, batch_size=None)),
    "stateful, shuffled": (True, lambda: stateful(TAKEN, batch_size=2, shuffle=True)),
    "distributed": (False, lambda: DataLoader(TAKEN, sampler=DistributedSampler(TAKEN, 2, 0))),
    "distributed, stateful": (False, lambda: stateful(TAKEN, sampler=DistributedSampler(TAKEN, 2, 0))),
    "divided": (False, lambda: DataLoader(TAKEN, batch_sampler=Shares(SequentialSampler(TAKEN), 2, False))),
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
        zeroshard.initialize(model, None, {}, training_data=stateful(TAKEN, batch_size=2)).engine.close()
    return [(str(one.message), one.filename) for one in caught if "all samples" in str(one.message)]


def test_one_of_the_ranks_warns_where_initialize_was_called(ranks):
    (said,), others = ranks(2, warnings_of_start)
    assert said[0].startswith(
        "training_data: the SequentialSampler of this StatefulDataLoader takes all samples"
    )
    assert said[1] == __file__
    assert others == []
