"""Remedies in errors of several ranks, of pipelines and of divided layers are followed, and they work."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.models import Tiny, small_llama
from tests.ranks import on_ranks
from tests.remedies.told import (
    DATA,
    adamw,
    loss_of,
    net,
    same,
    start,
    take_step,
    told,
    trained,
    trains,
    whole,
)


@on_ranks(2)
def test_gradients_are_taken_after_the_forward():
    class Differentiates(Tiny):
        def forward(self, x):
            x = x.requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x)[0]

    engine = start(Differentiates())
    with told("take gradients after the forward has returned"):
        engine(DATA.clone())
    x, y = (DATA.clone().requires_grad_() for _ in range(2))
    got = torch.autograd.grad(start()(x).sum(), x)[0]
    assert torch.equal(got, torch.autograd.grad(net()(y).sum(), y)[0])


@on_ranks(2)
def test_norms_and_counts_are_those_of_the_engine():
    model = net()
    engine = start()
    assert engine.num_parameters() == sum(p.numel() for p in model.parameters())
    with engine.unsharded(engine.module.inner):
        assert torch.equal(engine.module.inner.weight.norm(), model.inner.weight.norm())
    engine.backward(loss_of(engine))
    loss_of(model).backward()
    with told("use engine.clip_grad_norm_(max_norm) or Config(clip_grad_norm=...) instead"):
        nn.utils.clip_grad_norm_(engine.parameters(), 0.01)
    norm = engine.clip_grad_norm_(0.01)
    torch.testing.assert_close(
        norm, nn.utils.clip_grad_norm_(model.parameters(), 0.01).double(), check_dtype=False
    )
    engine.step()
    clipped = start(clip_grad_norm=0.01)
    take_step(clipped)
    same(whole(clipped), whole(engine))


@on_ranks(2)
def test_sums_of_micro_batches_are_dropped_by_zero_grad():
    def begun():
        engine = start()
        loss_of(engine).backward()
        with engine.no_sync():
            loss_of(engine).backward()
        return engine

    engine = begun()
    with told("call zero_grad() of the engine, the optimizer or the model"):
        for parameter in engine.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
    for drop in (lambda e: e.zero_grad(), lambda e: e.optimizer.zero_grad(), lambda e: e.module.zero_grad()):
        engine = begun()
        drop(engine)
        trains(engine)


# ----------------------------------------------------------------------------- pipelines and tensor ranks


WIDE = DATA.double()


def near(engine, model):
    """The step over WIDE is that of plain PyTorch, in float64 and up to the order of additions."""
    want = trained(model, losses=[lambda model: loss_of(model, WIDE)])
    for name, value in whole(engine).items():
        torch.testing.assert_close(value, want[name], rtol=1e-9, atol=1e-12)


def divided(model, plan):
    return zeroshard.initialize(model, adamw, {"mesh": {"tp": 2}}, tp_plan=plan).engine


@on_ranks(2)
def test_both_names_of_a_tied_layer_are_in_the_plan():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
            self.head.weight = self.table.weight
            self.double()

        def forward(self, x):
            return self.head(self.table((x * 3).long() % 8).sum(1))

    with told("which is not; expected both in the plan"):
        divided(Tied(), {"head": "colwise_gather_output"})
    engine = divided(Tied(), {"head": "colwise_gather_output", "table": "rowwise"})
    take_step(engine, lambda model: loss_of(model, WIDE))
    near(engine, Tied())


@on_ranks(2)
def test_a_vocabulary_is_padded_and_logits_gathered():
    tokens = torch.arange(12).view(2, 6)
    with told("33 elements cannot be divided over mesh.tp=2 ranks; expected a multiple"):
        divided(small_llama(vocab_size=33), None)
    model = small_llama(vocab_size=33)
    model.resize_token_embeddings(pad_to_multiple_of=2)
    plain = copy.deepcopy(model)
    engine = divided(model, None)
    output, want = engine(input_ids=tokens, labels=tokens), plain(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(output.loss, want.loss)
    with told("call outputs.logits.gather() on all of them", kind=(TypeError, AttributeError)):
        output.logits.argmax(-1)
    torch.testing.assert_close(output.logits.gather(), want.logits)
    with told("give a tp_plan with 'colwise_gather_output' for the head", kind=(TypeError, AttributeError)):
        output.logits.argmax(-1)


@on_ranks(2)
def test_a_shared_weight_is_edited_without_a_choice_of_modules():
    def tied():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(4))).double()
        model[3][0].weight = model[0][0].weight
        return model

    pipeline = {"num_microbatches": 2, "balance": "memory"}
    engine = start(tied(), adamw, lambda output, _: output.square().mean(), mesh={"pp": 2}, pipeline=pipeline)
    part = [engine.module[1]] if dist.get_rank() == 0 else []
    with told("call unsharded() without modules"), engine.unsharded(*part, write_back=True):
        pass
    with engine.unsharded(write_back=True):
        for parameter in engine.module.parameters():
            parameter.data.mul_(2)
    model = tied()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    engine.train_batch(WIDE, WIDE)
    near(engine, model)
