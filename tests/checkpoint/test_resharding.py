"""Saved at one layout, loaded at any other: the same bits, averages too, and the same training after that."""

from functools import cache

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import zeroshard
from tests.checkpoint.runs import BATCH, adamw, build, differences, start, state, train, without_numba
from zeroshard import optim
from zeroshard.checkpoint.files import find

BEFORE, AFTER = range(2), range(2, 4)
HYBRID = {"stage": 3, "shard_group_size": 2}
OPTIMIZERS = {
    "AdamW": adamw,
    "AdEMAMix8bit": lambda model: optim.AdEMAMix8bit(
        model.parameters(), lr=1e-2, t_alpha=5, t_beta3=5, min_8bit_size=0
    ),
}
"""The second one quantizes all states, also of parameters of one element and of none."""


def begin(config, kind, seed=0, dropout=0.0):
    engine = start(config, OPTIMIZERS[kind], model=build(seed, dropout=dropout))
    return engine, zeroshard.EMA(engine, 0.9)


def now(engine, ema, losses=None):
    """The state, with the averages as the model shows them."""
    found = state(engine, losses)
    with ema.applied():
        found.tensors |= {f"average of {key}": value for key, value in engine.full_state_dict().items()}
    found.values["updates"] = ema.num_updates
    return found


@without_numba
def save(folder, kind, dropout=0.0):
    """Save in the background, and return the state of that moment, and state and losses at the end."""
    engine, ema = begin(3, kind, dropout=dropout)
    train(engine, BEFORE)
    engine.save_checkpoint(folder, blocking=False)
    stop = now(engine, ema)
    end = now(engine, ema, train(engine, AFTER))
    engine.close()
    return stop, end


@without_numba
def resume(folder, configs, kind, back=None, dropout=0.0):
    """By config: the state that was loaded, and that after more steps; saved again to `back`."""
    found = []
    for number, config in enumerate(configs):
        engine, ema = begin(config, kind, seed=1, dropout=dropout)
        engine.load_checkpoint(folder)
        loaded = now(engine, ema)
        if back is not None:
            engine.save_checkpoint(f"{back}/{number}")
        found.append((loaded, now(engine, ema, train(engine, AFTER))))
    return found


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """By optimizer: a checkpoint of 2 ranks at stage 3, the state in it, and how training goes on."""

    @cache
    def of(kind):
        folder = tmp_path_factory.mktemp("saved")
        return folder, *ranks(2, save, folder, kind)[0]

    return of


@pytest.mark.long_where(kind=["AdamW"])
@pytest.mark.long_where(num_ranks=[1, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("num_ranks", "configs"), [(1, [3]), (3, [0]), (4, [1, 2, HYBRID])])
def test_what_two_ranks_saved_goes_on_at_another_number_of_ranks_and_comes_back(
    ranks, saved, tmp_path, num_ranks, configs, kind
):
    assert BATCH % num_ranks == 0
    folder, stop, end = saved(kind)
    for loaded, after in ranks(num_ranks, resume, folder, configs, kind, tmp_path)[0]:
        assert not differences(loaded, stop)
        assert after.losses == pytest.approx(end.losses, rel=1e-5)
        assert after.values["updates"] == len([*BEFORE, *AFTER])
        for name in end.tensors.keys() - {"average of average"}:  # each rank has its own, of its data
            if "average of" in name:
                torch.testing.assert_close(after.tensors[name], end.tensors[name], rtol=1e-3, atol=1e-4)
    for number, _ in enumerate(configs):
        [(again, after)] = ranks(2, resume, tmp_path / str(number), [3], kind)[0]
        assert not differences(again, stop)
        assert after.losses == end.losses


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_codes_in_the_shape_of_the_parameter_and_scales_in_one_dimension(saved):
    folder, stop, _ = saved("AdEMAMix8bit")
    shapes = {name: p.shape for name, p in build().named_parameters()}
    for fqn in ("mix", "gain", "empty", "tokens.weight"):
        got = {
            f"optimizer/{fqn}/exp_avg_slow": torch.zeros(shapes[fqn], dtype=torch.uint8),
            f"optimizer/{fqn}/exp_avg_slow_absmax": torch.full(((shapes[fqn].numel() + 255) // 256,), 7.0),
        }
        dcp.load(got, storage_reader=FileSystemReader(find(folder)), no_dist=True)
        codes, scales = got.values()
        assert torch.equal(codes.view(-1), stop.tensors[fqn, "exp_avg_slow"])
        assert torch.equal(scales, stop.tensors[fqn, "exp_avg_slow_absmax"])
