"""Pipelines on GPUs: the losses, norms and parameters of one process."""

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.gpu.training import BF16, gpus
from tests.parallel.pipeline import runs

STEPS = range(6)
ON = [
    pytest.param(2, {"pp": 2}, marks=gpus(2)),
    pytest.param(4, {"pp": 2}, marks=gpus(4)),
    pytest.param(4, {"pp": 2, "tp": 2}, marks=gpus(4)),
    pytest.param(4, {"pp": 4}, marks=gpus(4)),
]


def build(name):
    torch.manual_seed(0)
    return runs.MODELS[name]()


def plain(name, device):
    model, losses, norms = build(name).to(device), [], []
    optimizer = runs.sgd(model.parameters())
    for number in STEPS:
        tokens = runs.tokens_of(number).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = model.named_parameters(remove_duplicate=False)
    return losses, norms, {key: value.detach().cpu() for key, value in state}


def trained(name, mesh, schedule, stage, precision):
    """Losses, norms and parameters of this rank; and the values of one process, on rank 0."""
    pipeline = {"schedule": schedule, "num_microbatches": 4, "balance": "memory"}
    config = {"stage": stage, "mesh": mesh, "pipeline": pipeline, "precision": precision}
    engine = zeroshard.initialize(build(name), runs.sgd, config | {"clip_grad_norm": 0.5}).engine
    losses, norms = runs.train(engine, STEPS)
    state = {key: value.cpu() for key, value in runs.parameters_of(engine).items()}
    device, is_first = engine.device, dist.get_rank() == 0
    engine.close(restore=False)
    return losses, norms, state, device.type, plain(name, device) if is_first else None


def compare(found, tolerance):
    want_losses, want_norms, want = found[0][-1]
    names = set()
    for losses, norms, state, device, _ in found:
        assert device == "cuda"
        assert losses == pytest.approx(want_losses, rel=tolerance)
        assert norms == pytest.approx(want_norms, rel=tolerance)
        names |= state.keys()
        for name, value in state.items():
            assert (value - want[name]).norm() <= tolerance * want[name].norm(), name
    assert names == want.keys()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("num_ranks", "mesh"), ON)
def test_a_tied_model_trains_as_in_one_process(ranks, num_ranks, mesh, schedule, stage):
    run = "tied llama", mesh, schedule, stage, {}
    compare(ranks(num_ranks, trained, *run, process_group=False, timeout=300), 1e-4)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "varuna"])
@pytest.mark.parametrize(("num_ranks", "mesh"), ON[:3])
def test_other_schedules_train_in_bf16(ranks, num_ranks, mesh, schedule):
    run = "llama", mesh, schedule, 3, BF16
    compare(ranks(num_ranks, trained, *run, process_group=False, timeout=300), 3e-2)
