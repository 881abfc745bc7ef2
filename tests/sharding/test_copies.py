"""Copies, pickles and wrappers of a sharded model are refused with the remedy, or work as before."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import zeroshard
from tests.distributed.training import OPTIMIZERS, STAGES, numbers, train_replicated, train_sharded
from tests.ranks import on_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(7, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, inputs):
        inputs = self.inner(inputs)
        for block in self.blocks:
            inputs = block(inputs)
        return self.outer(inputs)


def build():
    torch.manual_seed(0)
    return Net()


def loss(model, number):
    return model(numbers(number, 5, 7)).square().mean()


def start(stage, **config):
    return zeroshard.initialize(build(), OPTIMIZERS["AdamW"], {"stage": stage, **config}).engine


@on_ranks(2)
def test_what_cannot_hold_a_sharded_model_is_refused_with_the_remedy():
    """What each attempt to copy, pickle or wrap raises, by stage."""
    remedies = {
        "copy": "load engine.full_state_dict() (called on all ranks) into another model",
        "pickle": "engine.save_checkpoint",
        "saved": "engine.save_checkpoint",
        "DDP": "leave DistributedDataParallel out",
        "fully_shard": "leave fully_shard out",
    }
    attempts = {
        "copy of the engine": copy.deepcopy,
        "copy of the model": lambda engine: copy.deepcopy(engine.module),
        "copy of a unit": lambda engine: copy.deepcopy(engine.module.blocks[0]),
        "copy of a part": lambda engine: copy.deepcopy(engine.module.blocks[0][0]),
        "copy of an optimizer": lambda engine: copy.deepcopy(engine.optimizer),
        "pickle of the engine": pickle.dumps,
        "saved engine": lambda engine: torch.save(engine, io.BytesIO()),
        "saved model": lambda engine: torch.save(engine.module, io.BytesIO()),
        "DDP of the engine": DistributedDataParallel,
        "DDP of the model": lambda engine: DistributedDataParallel(engine.module),
        "fully_shard of the engine": fully_shard,
        "fully_shard of the model": lambda engine: fully_shard(engine.module),
        "fully_shard of a part": lambda engine: fully_shard(engine.module.blocks[0][0]),
    }
    found = []
    for stage in STAGES:
        engine = start(stage)
        for name, attempt in attempts.items():
            try:
                attempt(engine)
                found.append((name, "nothing was raised"))
            except RuntimeError as error:
                found.append((name, str(error)))
        with engine.unsharded(), pytest.raises(RuntimeError, match="hooks of its engine"):
            copy.deepcopy(engine.module)
        engine.backward(loss(engine, 0))
        assert engine.step()
        engine.close()
        copy.deepcopy(engine.module)
    assert len(found) == 13 * len(STAGES)
    for name, text in found:
        assert remedies[name.split()[0]] in text, name


@on_ranks(2)
def test_saving_a_state_dict_of_slices_warns_and_names_what_saves_the_model():
    """By stage, the texts of warnings when slices, whole parameters and a copy are saved."""
    for stage in STAGES:
        engine = start(stage)
        texts = []
        for source in (engine, engine.module, engine.module.blocks[0]):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                state = source.state_dict()
                torch.save({"model": state}, file := io.BytesIO())
                texts.append([str(warning.message) for warning in caught if warning.filename == __file__])
            file.seek(0)
            loaded = torch.load(file, weights_only=True)["model"]
            assert all(torch.equal(loaded[name], value) for name, value in state.items())
            assert state._metadata.keys() == loaded._metadata.keys()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            copy.deepcopy(engine.state_dict())
            torch.save(engine.full_state_dict(), io.BytesIO())
            with engine.unsharded():
                torch.save(engine.state_dict(), io.BytesIO())
        for text in texts:
            assert len(text) == 1
            assert "engine.full_state_dict()" in text[0]
            assert "engine.save_pretrained(folder)" in text[0]


@on_ranks(2)
def test_saving_the_state_of_an_optimizer_over_slices_warns_and_names_what_saves_it():
    """By stage, the warnings when the state of an optimizer over slices is saved."""
    for stage in STAGES:
        engine = start(stage)
        engine.backward(loss(engine, 0))
        engine.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = engine.optimizer.state_dict()
            torch.save({"optimizer": state}, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["optimizer"]
        assert loaded["param_groups"] == state["param_groups"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
        texts = [str(warning.message) for warning in caught if warning.filename == __file__]
        assert len(texts) == 1
        assert "engine.save_checkpoint(folder)" in texts[0]


@pytest.mark.long_where(num_ranks=[2])
@on_ranks(1, 2, timeout=120.0)
def test_an_engine_inside_torch_compile_or_data_parallel_trains_as_before():
    """Stages at which an engine inside torch.compile or DataParallel trains to other losses."""
    found = []
    want = train_replicated(build(), "AdamW", 3, loss).losses
    wraps = {
        "compiled engine": lambda engine: torch.compile(engine, backend="eager"),
        "compiled model": lambda engine: torch.compile(engine.module, backend="eager"),
        "model compiled in place": lambda engine: (engine.module.compile(backend="eager"), engine)[1],
        "DataParallel": DataParallel,
    }
    for stage in STAGES:
        for name, wrap in wraps.items():
            engine = start(stage)
            wrapped, losses = wrap(engine), []
            for number in range(3):
                value = loss(wrapped, number)
                engine.backward(value)
                engine.step()
                losses.append(value.item())
            torch._dynamo.reset()
            if losses != train_sharded(build(), "AdamW", 3, loss, stage=stage).losses:
                found.append((stage, name, losses))
            if losses != pytest.approx(want, rel=1e-6, abs=0):
                found.append((stage, name, losses, want))
    return found


@on_ranks(2)
def test_a_whole_state_dict_is_not_loaded_into_slices_and_unsharded_loads_it():
    """By stage, what torch answers to a whole state dict; and where the remedy does not load it."""
    found = []
    for stage in STAGES:
        other = build()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1)
        engine = start(stage)
        for model, whole in ((engine.module, other), (engine.module.inner, other.inner)):
            with pytest.raises(RuntimeError, match="size mismatch"):
                model.load_state_dict(whole.state_dict())
        slices = copy.deepcopy(engine.module.state_dict())
        with engine.unsharded(write_back=True):
            engine.module.load_state_dict(other.state_dict())
        whole = engine.full_state_dict()
        wrong = [name for name, value in whole.items() if not torch.equal(value, other.state_dict()[name])]
        engine.module.load_state_dict(slices)
        same = [torch.equal(value, slices[name]) for name, value in engine.module.state_dict().items()]
        found.append((wrong, all(same)))
    assert found == [([], True)] * len(STAGES)


@on_ranks(2)
def test_an_attribute_of_a_shown_parameter_stays():
    """Attributes that were set on a shown parameter, on the sharded one and on what a forward sees."""
    found = []
    for stage in STAGES:
        engine = start(stage)
        with engine.unsharded():
            engine.module.inner.weight.no_decay = True
        seen = []
        engine.module.inner.register_forward_pre_hook(lambda m, _, seen=seen: seen.append(m.weight.no_decay))
        loss(engine, 0)
        found.append((engine.module.inner.weight.no_decay, seen))
    assert found == [(True, [True])] * len(STAGES)
