"""Optimizers of users that ask for whole tensors: Adafactor of transformers, as it is, over slices."""

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

import zeroshard
from tests.distributed.training import STAGES, seeded
from tests.optim.matrices import Net, gradient, is_used, step_plainly, step_sharded, unequal
from tests.ranks import on_ranks
from zeroshard.optim import UsesWholes, wholes_here
from zeroshard.stepping.wholes import WholesOverRanks

NUM_STEPS = 4
OPTIONS = {"lr": 0.01, "relative_step": False, "weight_decay": 0.1, "beta1": 0.9}


def adafactor(parameters):
    transformers = pytest.importorskip("transformers")
    return transformers.Adafactor(parameters, **OPTIONS)


class Wholly(Optimizer):
    """Another optimizer, which steps a whole copy of each parameter on the rank that owns it.

    The owner keeps the copy and the states of the other optimizer. What it returns are the new values.
    """

    wholes_of = staticmethod(wholes_here)

    def __init__(self, params, make):
        super().__init__(params, {})
        self.make, self.stepped = make, {}

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        with_grad = [p for p in parameters if p.grad is not None]
        new = [p for p in with_grad if p not in self.state]

        def keep(wholes, keys):
            for whole, key in zip(wholes, keys, strict=True):
                copy = torch.nn.Parameter(whole)
                self.stepped[new[key.parameter]] = copy, self.make([copy])
            return wholes

        def advance(wholes, keys):
            for whole, key in zip(wholes, keys, strict=True):
                copy, optimizer = self.stepped[with_grad[key.parameter]]
                copy.grad = whole
                optimizer.step()
            return [self.stepped[with_grad[key.parameter]][0].detach().clone() for key in keys]

        self.wholes_of(new, [p.detach() for p in new], keep)
        for p in new:
            self.state[p]["has_begun"] = True
        values = self.wholes_of(with_grad, [p.grad for p in with_grad], advance)
        for p, value in zip(with_grad, values, strict=True):
            p.copy_(value)


def plain():
    """Adafactor of transformers in one process, over whole parameters."""
    model = seeded(Net)
    trained = [p for name, p in model.named_parameters() if p.requires_grad and name != "empty"]
    step_plainly(model, adafactor(trained), range(NUM_STEPS))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.long_where(num_ranks=[4])
@on_ranks(2, 4)
def test_adafactor_of_transformers_steps_sharded_parameters_to_the_bits_of_one_process(num_ranks):
    want = plain()
    hybrid = [{"stage": 3, "shard_group_size": 2}] if num_ranks == 4 else []
    for config in [*({"stage": stage} for stage in STAGES), *hybrid]:
        model = seeded(Net)
        trained = [p for name, p in model.named_parameters() if p.requires_grad and name != "empty"]
        optimizer = Wholly(trained, adafactor)
        engine = zeroshard.initialize(model, optimizer, config).engine
        step_sharded(engine, optimizer, range(NUM_STEPS))
        assert not unequal(engine.full_state_dict(), want)
        owned = [None] * num_ranks
        dist.all_gather_object(owned, [p.fqn for p in optimizer.stepped])
        trained = (p.fqn for p in engine.parameters() if p.requires_grad and p.fqn != "empty")
        used = sorted(name for name in trained if is_used(name, 0))
        assert sorted(name for own in owned for name in own) == used
        engine.close(restore=False)


@on_ranks(1)
def test_ignored_parameters_are_refused():
    model = seeded(Net)
    model.register_parameter("alone", torch.nn.Parameter(torch.ones(6, 2)))
    engine = zeroshard.initialize(model, None, {"ignored": ["alone"]}).engine
    wholes_of = WholesOverRanks(engine._runtime.buffers, engine._axes)
    with pytest.raises(RuntimeError, match="or an ignored one: step it by an optimizer of its own"):
        wholes_of([engine.module.alone], [torch.ones(6, 2)], lambda wholes, keys: wholes)


class KeepsRows(Optimizer):
    """An optimizer with a state that is not element-wise, on the owner of each matrix."""

    wholes_of = staticmethod(wholes_here)

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]

        def rows(wholes, keys):
            for whole, key in zip(wholes, keys, strict=True):
                self.state[parameters[key.parameter]]["rows"] = whole.sum(-1)
            return wholes

        updates = self.wholes_of(parameters, [p.grad for p in parameters], rows)
        for p, update in zip(parameters, updates, strict=True):
            p.sub_(update)


@on_ranks(2)
def test_a_checkpoint_refuses_state_of_whole_tensors_by_its_name(tmp_path):
    model = seeded(Net)
    optimizer = KeepsRows([model.layers[0].tall.weight])
    engine = zeroshard.initialize(model, optimizer, {"stage": 3}).engine
    engine.set_full_gradient("layers.0.tall.weight", gradient("x", 0, (70, 24)))
    optimizer.step()
    with pytest.raises(
        (ValueError, RuntimeError), match=r"KeepsRows: state 'rows' of 'layers\.0\.tall\.weight' .* \(70,\)"
    ):
        engine.save_checkpoint(tmp_path)


def test_an_optimizer_that_asks_for_whole_tensors_says_so_by_its_attribute():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    assert isinstance(Wholly([weight], adafactor), UsesWholes)
    assert not isinstance(torch.optim.SGD([weight]), UsesWholes)
