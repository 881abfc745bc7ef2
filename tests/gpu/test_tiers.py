"""Main parameters and optimizer states on the host, against a run that keeps them on the device."""

import gc

import pytest
import torch

from tests.gpu.training import BF16, build, gpus, start
from tests.stores.held import held_bytes
from tests.stores.tiers import num_notes

WIDTH, DEPTH = 1024, 8
MB = 1 << 20
SLACK = 64 * MB
HOST = {"optimizer": "cpu"}
PRECISIONS = [
    pytest.param({}, id="fp32"),
    pytest.param(BF16, id="bf16"),
    pytest.param(BF16 | {"main_dtype": "bf16"}, id="bf16 main"),
]


def train_there(engine, numbers):
    """Losses; the batches are on the device that computes, wherever the parameters lie."""
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(64, engine.module.width, generator=generator).cuda()
        targets = torch.randint(256, (64,), generator=generator).cuda()
        loss = torch.nn.functional.cross_entropy(engine(inputs).float(), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def losses_and_weights(stage, precision, offload):
    """Losses, and the largest difference of a weight to a run without offload."""
    config = {"precision": precision} | ({} if "step_in_backward" in offload else {"clip_grad_norm": 1.0})
    plain = start(build(), stage, **config)
    moved = start(build(), stage, offload=offload, **config)
    losses = train_there(plain, range(5)), train_there(moved, range(5))
    weights = plain.full_state_dict(), moved.full_state_dict()
    differences = [(weights[1][name] - one).abs().max().item() for name, one in weights[0].items()]
    return *losses, max(differences, default=0.0)  # rank 0 alone has the weights


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=gpus(n)) for n in (1, 2)])
def test_steps_of_other_tiers_have_the_values_of_the_device(on_gpus, tmp_path, num_ranks, stage, precision):
    files, early = {"optimizer": "nvme", "nvme_path": str(tmp_path)}, {"step_in_backward": True}
    tiers = [HOST, {**HOST, "device_fraction": 0.5}, files]
    if stage == 3:
        tiers += [HOST | early, files | early, {**HOST, "parameters": "cpu"} | early]
        tiers += [files | {"parameters": "cpu"}, files | {"parameters": "nvme"} | early]
        tiers += [{**HOST, "device_fraction": 0.5} | early]
    for offload in tiers:
        for plain, moved, difference in on_gpus(num_ranks, losses_and_weights, stage, precision, offload):
            if "step_in_backward" in offload:  # no norm is taken
                assert moved == plain
                assert difference == 0
                continue
            assert moved == pytest.approx(plain, rel=1e-2 if precision else 1e-6)
            assert difference <= most_different(precision)


def most_different(precision):
    """A norm of other parts may have another last bit, which bfloat16 can turn into one of its own."""
    return 1e-2 if "main_dtype" in precision else 1e-3 if precision else 1e-6


def micro_batches(stage, precision, offload):
    """Losses and norms of two steps of three micro-batches, weights, and how many buffers have a note."""
    config = {"precision": precision, "clip_grad_norm": 0.01, "gradient_accumulation_steps": 3}
    engine = start(build(), stage, offload=offload, **config)
    losses = train_there(engine, range(3))
    norms = [engine.grad_norm.item()]
    for number in (3, 4):
        losses += train_there(engine, [number])
    inputs = torch.randn(64, engine.module.width, generator=torch.Generator().manual_seed(5)).cuda()
    engine.backward(engine(inputs).float().square().mean())
    num_noted = num_notes(engine._runtime)
    engine.step()
    weights = [weight.cpu() for weight in engine.full_state_dict().values()]
    return losses, [*norms, engine.grad_norm.item()], weights, num_noted


def plain_and_far_micro_batches(stage, precision):
    losses, norms, weights, _ = micro_batches(stage, precision, {})
    moved = micro_batches(stage, precision, HOST)
    differences = [(a - b).abs().max().item() for a, b in zip(weights, moved[2], strict=True)]
    return (losses, norms), moved[:2], max(differences, default=0.0), moved[3]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=gpus(n)) for n in (1, 2)])
def test_the_device_adds_up_micro_batches_and_their_norm(on_gpus, num_ranks, stage, precision):
    for plain, moved, difference, num_noted in on_gpus(
        num_ranks, plain_and_far_micro_batches, stage, precision
    ):
        for one, other in zip(plain, moved, strict=True):
            assert other == pytest.approx(one, rel=1e-2 if precision else 1e-6)
        assert difference <= most_different(precision)
        # Other main parameters are those that the device computes with; they and their gradients stay there.
        assert bool(num_noted) is (precision == BF16)


def bytes_held(offload):
    """Elements; bytes on the device at rest; pinned bytes of main parameters, before a step and after one.

    The flat gradient that is kept for the next backward does not count, nor do the pieces in which the device
    steps.
    """
    model = build(WIDTH, DEPTH)
    engine = start(model, 3, offload=offload)
    num = sum(buffer.main.numel() for buffer in engine._runtime.buffers)
    largest = max(buffer.layout.total for buffer in engine._runtime.buffers) * 4
    del model
    gc.collect()
    before = held_bytes().pinned
    train_there(engine, range(2))
    gc.collect()
    torch.cuda.synchronize()
    assert next(engine.parameters()).device.type == ("cpu" if offload else "cuda")
    pieces = engine._runtime.context.memory.piece_bytes
    return num, torch.cuda.memory_allocated() - largest - pieces, before, held_bytes().pinned


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=gpus(1))])
def test_the_device_keeps_no_states_and_pinned_bytes_are_exact(on_gpus, num_ranks):
    ((num, plain, *none),) = on_gpus(num_ranks, bytes_held, {})
    assert none == [0, 0]
    offload = {**HOST, "parameters": "cpu"}
    ((_, moved, before, after),) = on_gpus(num_ranks, bytes_held, offload)
    assert plain >= 12 * num * 0.99
    assert moved <= SLACK
    assert before == 4 * num  # main parameters in float32, from which gathers start
    # And states, which have no padding, and gradients, in memory that the next backward uses again.
    assert after == pytest.approx(16 * num, rel=0.01)
