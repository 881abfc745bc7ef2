"""Ten steps in float32 beside one process: losses and parameters within 1e-5, norms within 1e-6."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

import zeroshard
from tests.parallel import test_divided, test_experts_divided, test_own_plans, test_transformers_plans

BATCH, STEPS = 8, 10
LAYOUTS = [(2, 2), (2, 1), (4, 2), (4, 4), (8, 2)]


def llama(seed):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**test_transformers_plans.GROUPED))


def loss_of_tokens(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def loss_of_gpt(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


MODELS = {
    "tied GPT": (lambda seed: test_divided.build(seed).float(), loss_of_gpt, test_divided.PLAN),
    "Llama, grouped queries": (llama, loss_of_tokens, None),
    "Mixtral": (lambda seed: test_experts_divided.build("Mixtral", seed).float(), loss_of_tokens, None),
    "T5": (lambda seed: test_own_plans.build("T5", seed).float(), loss_of_tokens, None),
}


def sgd(parameters):
    # Adam divides a gradient by its own size, and so shows rounding of gradients near 0 as whole steps.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def tokens_of(number):
    return torch.randint(24, (BATCH, 8), generator=torch.Generator().manual_seed(number))


def plain(name, num_parts):
    """One process; a loss is the mean over the parts of a batch, since that of routers is of each part."""
    build, loss_of, _ = MODELS[name]
    model = build(0).train()
    optimizer, losses, norms = sgd(model.parameters()), [], []
    for number in range(STEPS):
        loss = sum(loss_of(model, part) for part in tokens_of(number).chunk(num_parts)) / num_parts
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def divided(name, stage, tp, optimizer=sgd):
    build, loss_of, plan = MODELS[name]
    config = {"stage": stage, "mesh": {"tp": tp}, "clip_grad_norm": 1e9}
    model = build(dist.get_rank()).train()
    engine = zeroshard.initialize(model, optimizer, config, tp_plan=plan).engine
    axis, losses, norms = engine._axes.dp, [], []
    for number in range(STEPS):
        loss = loss_of(engine, tokens_of(number).chunk(axis.size)[axis.rank])
        engine.backward(loss)
        engine.step()
        norms.append(engine.grad_norm.item())
        losses.append((axis.sum(loss.detach(), "test") / axis.size).item())
    state = engine.full_state_dict()
    engine.close(restore=False)
    return losses, norms, state


@pytest.mark.long_where(name=["tied GPT", "Mixtral", "T5"])
@pytest.mark.long_where(layout=[(2, 1), (4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("layout", LAYOUTS, ids="{0[0]} ranks, tp {0[1]}".format)
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_are_those_of_one_process_at_every_stage(ranks, name, layout):
    num_ranks, tp = layout
    want_losses, want_norms, want = plain(name, num_ranks // tp)
    states = []
    for stage in range(4):
        (losses, norms, state), *others = ranks(num_ranks, divided, name, stage, tp, timeout=200)
        assert losses == pytest.approx(want_losses, rel=1e-5)
        assert norms == pytest.approx(want_norms, rel=1e-6)
        assert all(other[:2] == (losses, norms) for other in others)
        for key, value in want.items():
            assert (state[key] - value).norm() <= 1e-5 * value.norm(), key
        states.append((losses, norms, state))
    for losses, norms, state in states[1:]:
        assert (losses, norms) == states[0][:2]
        assert all(torch.equal(value, states[0][2][key]) for key, value in state.items())
