"""A loop of Lightning Fabric with ZeroShardFabricStrategy."""

import pytest

pytest.importorskip("lightning")

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn

from tests.integrations.classifier import loader
from tests.integrations.runs import largest_difference
from zeroshard.integrations.fabric import ZeroShardFabricStrategy


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Dropout(0.1), nn.Linear(8, 3))


def start(strategy, **options):
    fabric = Fabric(
        accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=strategy, **options
    )
    fabric.launch()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    torch.manual_seed(1)
    return fabric, model, optimizer


def train(fabric, model, optimizer, *, num_micro_batches=1, clip=None, closure=False):
    losses = []
    for number, (inputs, targets) in enumerate(fabric.setup_dataloaders(loader()), start=1):
        is_last = number % num_micro_batches == 0

        def compute(inputs=inputs, targets=targets):
            loss = F.cross_entropy(model(inputs), targets)
            fabric.backward(loss / num_micro_batches)
            losses.append(loss.item())

        if closure:
            optimizer.step(compute)
            optimizer.zero_grad()
            continue
        with fabric.no_backward_sync(model, enabled=not is_last):
            compute()
        if is_last:
            if clip is not None:
                fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def whole(model):
    engine = model._forward_module
    full = getattr(engine, "full_state_dict", None)
    return full() if full is not None else dict(engine.module.state_dict())


def beside_ddp(stage, options):
    theirs, ours = start(DDPStrategy()), start(ZeroShardFabricStrategy({"stage": stage}))
    torch.manual_seed(1)
    expected = train(*theirs, **options)
    torch.manual_seed(1)
    losses = train(*ours, **options)
    return expected, losses, largest_difference(whole(ours[1]), whole(theirs[1]))


@pytest.mark.parametrize("options", [{}, {"closure": True}])
def test_losses_and_parameters_are_the_bits_of_ddp(ranks, options):
    for expected, losses, difference in ranks(2, beside_ddp, 3, options):
        assert len(losses) == 6
        assert losses == expected
        assert difference == 0


@pytest.mark.parametrize("clip", [{"max_norm": 0.1}, {"clip_val": 0.01}])
def test_accumulation_and_clipping_are_those_of_ddp(ranks, clip):
    options = {"num_micro_batches": 3, "clip": clip}
    for expected, losses, difference in ranks(2, beside_ddp, 3, options):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert difference < 1e-6


def stop_and_resume(folder):
    fabric, model, optimizer = start(ZeroShardFabricStrategy())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.9)
    train(fabric, model, optimizer)
    scheduler.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 1, "note": "kept"}
    fabric.save(folder, state)
    losses = train(fabric, model, optimizer)

    fabric, model, optimizer = start(ZeroShardFabricStrategy({"stage": 2}))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.9)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    rest = fabric.load(folder, state)
    found = (rest, state["epoch"], scheduler.last_epoch)
    resumed = train(fabric, model, optimizer)

    fabric, model, _ = start(ZeroShardFabricStrategy({"stage": 1}))
    fabric.load(folder, {"model": model}, strict=False)
    with pytest.raises(KeyError, match="has no 'other'"):
        fabric.load(folder, {"model": model, "other": 0})
    return losses, resumed, found


def test_a_saved_loop_goes_on_to_the_same_bits_at_another_stage(ranks, tmp_path):
    for losses, resumed, found in ranks(2, stop_and_resume, str(tmp_path / "saved")):
        assert resumed == losses
        assert found == ({"note": "kept"}, 1, 1)


def refusals():
    """The errors of calls that an engine cannot follow."""

    def said(call):
        with pytest.raises(ValueError, match=r".") as caught:
            call()
        return str(caught.value)

    fabric, model, optimizer = start(ZeroShardFabricStrategy())
    other = build_model()
    both = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (other[0], other[1])]
    half = Fabric(accelerator="cpu", devices=1, strategy=ZeroShardFabricStrategy(), precision="bf16-mixed")
    half.launch()
    errors = [
        said(lambda: fabric.setup(other, *both)),
        said(lambda: half.setup(other, both[0])),
        said(lambda: fabric.setup_optimizers(both[0])),
        said(lambda: fabric.save("nowhere", {"optimizer": optimizer})),
        said(lambda: fabric.save("nowhere", {"model": model}, filter={"model": lambda name, value: True})),
        said(lambda: fabric.load("nowhere")),
    ]
    second = fabric.setup(build_model())
    loss = model(torch.ones(1, 8)).sum()
    errors.append(said(lambda: fabric.backward(loss)))
    fabric.backward(loss, model=model)
    assert second(torch.ones(1, 8)).shape == (1, 3)
    return errors


def test_calls_that_an_engine_cannot_follow_are_refused(ranks):
    expected = (
        "one optimizer, got 2",
        "set precision in the config",
        "model, optimizer = fabric.setup(model, optimizer)",
        "expected a state with one model",
        "expected no filter",
        "expected a state with one model",
        "2 were set up",
    )
    (errors,) = ranks(1, refusals)
    assert len(errors) == len(expected)
    for error, part in zip(errors, expected, strict=True):
        assert part in error


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mesh": {"pp": 2}}, r"^the strategy of Fabric: expected mesh\.pp=1, got 2"),
        ({"mesh": {"tp": 2}}, r"^mesh\.tp: the strategy of Fabric gives each process other data"),
        ({"device": "cuda"}, "set accelerator and devices of Fabric"),
        ({"gradient_accumulation_steps": 2}, r"use fabric\.no_backward_sync"),
    ],
)
def test_settings_in_the_wrong_place_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        ZeroShardFabricStrategy(config)
