"""All stages against DistributedDataParallel, and what a run goes on from."""

import pytest
import torch
from torch import nn

from tests.gpu.training import BF16, STAGES, build, gpus, start, train, train_replicated

STEPS = range(10)


def losses_of_all(precision):
    """This rank's losses: of the reference, and with the norm of the first gradients, by stage."""
    model, found = build(), {}
    for stage in STAGES:
        engine = start(model, stage, precision=precision, clip_grad_norm=1e9)
        losses, norm = train(engine, STEPS[:1]), engine.grad_norm.item()
        found[stage] = losses + train(engine, STEPS[1:]), norm
    return train_replicated(model, engine.device, STEPS, bf16=bool(precision)), found, engine.device.type


@pytest.mark.parametrize(("precision", "tolerance"), [({}, 1e-4), (BF16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=gpus(n)) for n in (1, 2, 4)])
def test_losses_of_all_stages_are_those_of_ddp_and_norms_are_equal(on_gpus, num_ranks, precision, tolerance):
    for want, found, device in on_gpus(num_ranks, losses_of_all, precision):
        assert device == "cuda"
        for stage, (losses, norm) in found.items():
            assert losses == pytest.approx(want, rel=tolerance), f"stage {stage}"
            assert norm == pytest.approx(found[0][1], rel=tolerance if precision else 1e-6)


def resumed(folder, blocking):
    """Losses after a save, of the run that went on and of one that loaded it."""
    engine = start(build(), 3, precision=BF16)
    train(engine, range(3))
    engine.save_checkpoint(folder, blocking=blocking)
    went_on = train(engine, range(3, 8))
    engine.save_checkpoint(folder, "last")  # waits for the one in the background
    other = start(build(), 3, precision=BF16)
    other.load_checkpoint(folder, "step-3")
    return went_on, train(other, range(3, 8))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=gpus(n)) for n in (1, 2)])
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_ended(on_gpus, tmp_path, num_ranks, blocking):
    results = on_gpus(num_ranks, resumed, str(tmp_path), blocking)
    for went_on, loaded in results:
        assert loaded == pytest.approx(went_on, rel=1e-3)  # kernels may add in another order


def accumulated_in_half():
    """A float16 run with accumulation and clipping by train_batch, from batches in host memory."""
    engine = start(
        build(),
        3,
        precision={"param_dtype": "fp16"},
        gradient_accumulation_steps=2,
        clip_grad_norm=1.0,
    )
    engine.loss_fn = lambda logits, targets: torch.nn.functional.cross_entropy(logits.float(), targets)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(64, 256, generator=generator), torch.arange(64)
    losses = [engine.train_batch(inputs, targets).item() for _ in range(30)]
    return losses, engine.global_step + engine.skipped_steps


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=gpus(n)) for n in (1, 2)])
def test_train_batch_learns_in_float16_from_batches_in_host_memory(on_gpus, num_ranks):
    for losses, num_steps in on_gpus(num_ranks, accumulated_in_half):
        assert num_steps == 30
        assert losses[-1] < losses[0] / 2


class Recurrent(nn.Module):
    """cuDNN gives the weights of its layer other memory in the first forward."""

    def __init__(self, width):
        super().__init__()
        self.width, self.head = width, nn.Linear(width, 256)
        self.layer = nn.LSTM(width, width, num_layers=2)

    def forward(self, x):
        self.layer.flatten_parameters()
        return self.head(self.layer(x)[0])


def losses_of_recurrent():
    torch.manual_seed(0)
    model, found = Recurrent(64), {}
    for stage in STAGES:
        engine = start(model, stage)
        found[stage] = train(engine, STEPS)
    return train_replicated(model, engine.device, STEPS, bf16=False), found


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=gpus(n)) for n in (1, 2)])
def test_recurrent_layers_compute_with_the_values_after_the_last_step(on_gpus, num_ranks):
    for want, found in on_gpus(num_ranks, losses_of_recurrent):
        for stage, losses in found.items():
            assert losses == pytest.approx(want, rel=1e-4), f"stage {stage}"
