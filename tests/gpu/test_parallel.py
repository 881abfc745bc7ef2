"""Pipelines and divided layers on GPUs: the losses, norms and parameters of one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import zeroshard
from tests.gpu.training import BF16, STAGES, gpus
from tests.parallel import runs, sequences
from tests.parallel.pipeline import runs as pipelined

STEPS = range(6)
MAX_NORM = 0.5
DIVIDED = {"whole rows": (runs, runs.Model), "parts of the sequence": (sequences, sequences.Model)}


def model_of(name):
    torch.manual_seed(0)
    return DIVIDED[name][1]() if name in DIVIDED else pipelined.MODELS[name]()


def tokens_of(name, number, device, own=slice(None)):
    if name not in DIVIDED:
        return pipelined.tokens_of(number).to(device)
    of, generator = DIVIDED[name][0], torch.Generator().manual_seed(number)
    return torch.randint(of.VOCABULARY, (of.BATCH, of.LENGTH), generator=generator)[own].to(device)


def loss_of(name, model, tokens):
    if name not in DIVIDED:
        return model(input_ids=tokens, labels=tokens).loss
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def plain(name, device):
    """Losses, norms and parameters of one process."""
    model, losses, norms = model_of(name).to(device), [], []
    optimizer = pipelined.sgd(model.parameters())
    for number in STEPS:
        loss = loss_of(name, model, tokens_of(name, number, device))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = model.named_parameters(remove_duplicate=False)
    return losses, norms, {key: value.detach().cpu() for key, value in state}


def trained(name, config, plan=None):
    """Losses, norms, parameters and digests of this rank; and the values of one process, on rank 0."""
    config = {"clip_grad_norm": MAX_NORM, **config}
    engine = zeroshard.initialize(model_of(name), pipelined.sgd, config, tp_plan=plan).engine
    if name in DIVIDED:
        losses, norms, size = [], [], DIVIDED[name][0].BATCH // engine.dp_world_size
        own = slice(engine.dp_rank * size, (engine.dp_rank + 1) * size)
        for number in STEPS:
            loss = loss_of(name, engine, tokens_of(name, number, engine.device, own))
            engine.backward(loss)
            engine.step()
            losses.append((engine._axes.dp.sum(loss.detach(), "test")() / engine.dp_world_size).item())
            norms.append(engine.grad_norm.item())
        state, whole = engine.full_state_dict(), runs.digests(engine)
    else:
        losses, norms = pipelined.train(engine, STEPS)
        state, whole = pipelined.parameters_of(engine), {}
    state, device = {key: value.cpu() for key, value in state.items()}, engine.device
    engine.close(restore=False)
    return losses, norms, state, whole, device.type, plain(name, device) if dist.get_rank() == 0 else None


def compare(found, tolerance):
    want_losses, want_norms, want = found[0][-1]
    names = set()
    for losses, norms, state, _, device, _ in found:
        assert device == "cuda"
        assert losses == pytest.approx(want_losses, rel=tolerance)
        assert norms == pytest.approx(want_norms, rel=tolerance)
        names |= state.keys()
        for name, value in state.items():
            assert (value - want[name]).norm() <= tolerance * want[name].norm(), name
    assert names == want.keys()


ON = [
    pytest.param(2, {"pp": 2}, marks=gpus(2)),
    pytest.param(4, {"pp": 2}, marks=gpus(4)),
    pytest.param(4, {"pp": 2, "tp": 2}, marks=gpus(4)),
    pytest.param(4, {"pp": 4}, marks=gpus(4)),
]
CASES = [("tied llama", "1f1b", stage, {}, 1e-4) for stage in STAGES]
CASES += [("tied llama", "zb-h1", stage, {}, 1e-4) for stage in STAGES]
CASES += [("llama", schedule, 3, BF16, 3e-2) for schedule in ("interleaved", "zbv", "varuna")]


@pytest.mark.parametrize(("name", "schedule", "stage", "precision", "tolerance"), CASES)
@pytest.mark.parametrize(("num_ranks", "mesh"), ON)
def test_a_pipeline_trains_as_one_process(
    on_gpus, num_ranks, mesh, name, schedule, stage, precision, tolerance
):
    pipeline = {"schedule": schedule, "num_microbatches": 4, "balance": "memory"}
    config = {"stage": stage, "mesh": mesh, "pipeline": pipeline, "precision": precision}
    compare(on_gpus(num_ranks, trained, name, config), tolerance)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize(
    ("num_ranks", "tp"), [pytest.param(n, tp, marks=gpus(n)) for n, tp in ((2, 2), (4, 2), (4, 4))]
)
def test_a_divided_model_trains_as_one_process(on_gpus, num_ranks, tp, name, stage):
    config = {"stage": stage, "mesh": {"tp": tp}}
    compare(on_gpus(num_ranks, trained, name, config, DIVIDED[name][0].PLAN), 1e-4)


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=gpus(2))])
def test_tensor_ranks_go_on_with_the_same_bits_of_whole_parameters_in_bf16(on_gpus, num_ranks, name):
    config = {"stage": 3, "mesh": {"tp": 2}, "precision": BF16}
    found = on_gpus(num_ranks, trained, name, config, DIVIDED[name][0].PLAN)
    for losses, _, _, whole, _, _ in found:
        assert losses == pytest.approx(found[0][-1][0], rel=2e-2)
        assert [digest for _, digest in whole.values()] == [digest for _, digest in found[0][3].values()]
