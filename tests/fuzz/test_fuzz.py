"""Random models and configs train as in plain PyTorch, to the bit: the quick part; `make fuzz` is the whole.

A case that fails is run alone, and described, by `python -m tests.fuzz --seed SEED`.
"""

import functools

import pytest
import torch

from tests.checkpoint.runs import without_numba
from tests.fuzz import pipeline
from tests.fuzz.cases import build_case, num_ranks_of
from tests.fuzz.run import Trace, differences, failures, run_case, run_cases
from tests.fuzz.tensor import divided_case, tensor_ranks_of

# Of one and of two ranks: together they draw every stage, optimizer, precision, habit and act.
FAST = (2, 14, 0, 3, 15, 40, 114, 115, 131, 144, 152)
SEEDS = {*range(26), 145, 569, 656, 1150, 1529} - {*FAST}  # the last five found what the first ones do not
FEW = 6


@without_numba
def quickly(*args):
    """Compiling each rule of 8 bits would take seconds on each rank."""
    return run_cases(*args)


def parts():
    """Cases of one number of ranks, a few in a test."""
    for name, chosen in (("fast", FAST), ("more", sorted(SEEDS))):
        for num_ranks in (1, 2, 3, 4):
            seeds = [seed for seed in chosen if num_ranks_of(seed) == num_ranks]
            for begin in range(0, len(seeds), FEW):
                marks = [pytest.mark.long] * (name == "more")
                case = f"{name}-{num_ranks}-{begin}"
                yield pytest.param(num_ranks, seeds[begin : begin + FEW], marks=marks, id=case)


@pytest.mark.parametrize(("num_ranks", "seeds"), list(parts()))
def test_random_models_and_configs_train_as_plain_pytorch_to_the_bit(ranks, num_ranks, seeds):
    results = ranks(num_ranks, quickly, seeds, timeout=200)
    failed = failures(results)
    assert not failed, "".join(f"\n{build_case(seed).describe()}\n{lines}" for seed, lines in failed.items())
    assert results[0].keys() == set(seeds)


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_random_models_train_as_plain_pytorch_over_tensor_ranks(ranks, num_ranks):
    first = range(50 if num_ranks == 2 else 30)
    seeds = [seed for seed in first if 2 * num_ranks_of(seed) == num_ranks and divided_case(seed, 2)]
    results = ranks(num_ranks, quickly, seeds, functools.partial(run_case, tp=2), timeout=200)
    assert not failures(results)
    assert results[0].keys() == set(seeds)


PIPELINES = (0, 2, 10, 13, 16, 29, 57)  # root forwards and hooks, tied weights, every kind of model


@pytest.mark.parametrize("seeds", [PIPELINES, pytest.param(range(40), marks=pytest.mark.long)], ids=len)
def test_random_models_train_as_plain_pytorch_over_pipeline_ranks(ranks, seeds):
    own = [seed for seed in seeds if pipeline.num_ranks_of(seed) == 2]
    results = ranks(2, quickly, own, pipeline.run_case, timeout=200)
    assert not failures(results)
    assert results[0].keys() == set(own)


@pytest.mark.long
def test_random_models_train_as_plain_pytorch_over_pipeline_and_data_parallel_ranks(ranks):
    own = [seed for seed in range(40) if pipeline.num_ranks_of(seed) == 4]
    assert not failures(ranks(4, quickly, own, pipeline.run_case, timeout=200))


def test_a_seed_of_pipelines_makes_the_same_case_again():
    for seed in range(4):
        one, two = pipeline.build_case(seed), pipeline.build_case(seed)
        assert one == two
        assert one.num_ranks == pipeline.num_ranks_of(seed)
        states = [case.build().state_dict() for case in (one, two)]
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_seeds_draw_tensor_ranks_if_a_case_has_layers_for_them_and_there_are_ranks_enough():
    drawn = [tensor_ranks_of(seed, 4) for seed in range(24)]
    assert {1, 2} == set(drawn)
    assert all(divided_case(seed, 2) is not None for seed, tp in enumerate(drawn) if tp == 2)
    assert all(tensor_ranks_of(seed, 2 * num_ranks_of(seed) - 1) == 1 for seed in range(24))


def trace(**values):
    made = Trace()
    for what, value in values.items():
        made.note(what, value)
    return made


def test_a_single_bit_and_a_missing_value_are_differences():
    one = torch.ones(3)
    other = one.clone()
    other[1] = torch.nextafter(one[1], torch.tensor(2.0))
    assert differences(trace(loss=one), trace(loss=one.clone())) == []
    for got, want in (({"loss": one}, {"loss": other}), ({"loss": one}, {}), ({}, {"loss": one})):
        assert len(differences(trace(**got), trace(**want))) == 1
    assert differences(trace(loss=one), trace(loss=one.double()))
