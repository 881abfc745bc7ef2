"""Divided layers on GPUs: the losses, norms and parameters of one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import zeroshard
from tests.gpu.training import BF16, STAGES, gpus
from tests.parallel import runs, sequences
from tests.parallel.runs import digests

NUM_STEPS = 6


def model_of(sequence):
    model = sequences.build(sequences.Model) if sequence else runs.build(0)
    return model.float()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def tokens_of(number, of, own=slice(None)):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(of.VOCABULARY, (of.BATCH, of.LENGTH), generator=generator)[own]


def loss_of(model, tokens):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def plain(sequence, device):
    """Losses and state of one process."""
    of = sequences if sequence else runs
    model, losses = model_of(sequence).to(device), []
    optimizer = sgd(model.parameters())
    for number in range(NUM_STEPS):
        loss = loss_of(model, tokens_of(number, of).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def divided(sequence, tp, stage, precision):
    """Losses, state and digests of this rank; and the values of one process, on rank 0."""
    of = sequences if sequence else runs
    config = {"stage": stage, "mesh": {"tp": tp}, "precision": precision, "clip_grad_norm": 1e9}
    engine = zeroshard.initialize(model_of(sequence), sgd, config, tp_plan=of.PLAN).engine
    size, losses = of.BATCH // engine.dp_world_size, []
    own = slice(engine.dp_rank * size, (engine.dp_rank + 1) * size)
    for number in range(NUM_STEPS):
        loss = loss_of(engine, tokens_of(number, of, own).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append((engine._axes.dp.sum(loss.detach(), "test") / engine.dp_world_size).item())
    whole, state = digests(engine), {name: value.cpu() for name, value in engine.full_state_dict().items()}
    device, is_first = engine.device, dist.get_rank() == 0
    engine.close(restore=False)
    return losses, state, whole, device.type, plain(sequence, device) if is_first else None


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "tp"), [pytest.param(n, tp, marks=gpus(n)) for n, tp in ((2, 2), (4, 2), (4, 4))]
)
def test_a_divided_model_trains_as_in_one_process(ranks, num_ranks, tp, sequence, stage):
    runs = ranks(num_ranks, divided, sequence, tp, stage, {}, process_group=False, timeout=300)
    want_losses, want = runs[0][-1]
    for losses, state, _, device, _ in runs:
        assert device == "cuda"
        assert losses == pytest.approx(want_losses, rel=1e-4)
        for name, value in state.items():
            assert (value - want[name]).norm() <= 1e-4 * want[name].norm(), name


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("num_ranks", "tp"), [pytest.param(2, 2, marks=gpus(2))])
def test_ranks_go_on_with_the_same_bits_of_whole_parameters_in_bf16(ranks, num_ranks, tp, sequence):
    runs = ranks(num_ranks, divided, sequence, tp, 3, BF16, process_group=False, timeout=300)
    want_losses, _ = runs[0][-1]
    for losses, _, whole, _, _ in runs:
        assert losses == pytest.approx(want_losses, rel=2e-2)
        assert {name: digest for name, (_, digest) in whole.items()} == {
            name: digest for name, (_, digest) in runs[0][2].items()
        }
