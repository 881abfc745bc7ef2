"""A Trainer of Lightning with ZeroShardStrategy, and as docs/migrating.md has it."""

import pytest

pytest.importorskip("lightning")

import functools

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.runs import execute, largest_difference
from tests.ranks import on_ranks
from zeroshard.integrations.lightning import ZeroShardStrategy

QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Dropout(0.1), nn.Linear(8, 3))
        self.losses = []

    def training_step(self, batch, number):
        inputs, targets = batch
        loss = F.cross_entropy(self.net(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        inputs, targets = batch
        self.log("val_loss", F.cross_entropy(self.net(inputs), targets), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loader():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(24, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.abs().argmax(1) % 3), batch_size=2)


def fit(strategy, folder, *, epochs=2, resume=None, **options):
    """Train; the module with its losses, and the Trainer."""
    torch.manual_seed(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else [],
        enable_checkpointing=bool(folder),
        **QUIET,
        **options,
    )
    module = Classifier()
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    return module, trainer


@on_ranks(2)
def test_accumulation_is_that_of_ddp():
    ddp, theirs = fit(DDPStrategy(), None, epochs=1, accumulate_grad_batches=4)
    ours, trainer = fit(ZeroShardStrategy({"stage": 3}), None, epochs=1, accumulate_grad_batches=4)
    assert ours.losses == pytest.approx(ddp.losses, abs=1e-6)
    assert largest_difference(ours.state_dict(), ddp.state_dict()) < 1e-6
    assert theirs.global_step == trainer.global_step == 2


@on_ranks(2)
def test_a_new_trainer_goes_on_to_the_same_bits_and_one_that_only_validates_loads(tmp_path):
    """The loss that `fit` has logged at its end is that of its checkpoint."""
    config = {"clip_grad_norm": 0.1, "precision": "bf16"}
    whole, _ = fit(ZeroShardStrategy(config), None, epochs=3)
    _, trainer = fit(ZeroShardStrategy(config), tmp_path, epochs=2)
    resumed, _ = fit(ZeroShardStrategy(config), None, epochs=3, resume=tmp_path / "epoch=1.ckpt")
    assert resumed.losses == whole.losses[12:]
    assert len(resumed.losses) == 6
    assert largest_difference(whole.state_dict(), resumed.state_dict()) == 0
    alone = Trainer(accelerator="cpu", devices=2, strategy=ZeroShardStrategy({"precision": "bf16"}), **QUIET)
    (found,) = alone.validate(Classifier(), loader(), ckpt_path=tmp_path / "epoch=1.ckpt", verbose=False)
    assert found["val_loss"] == trainer.callback_metrics["val_loss"].item()


class Failing(Classifier):
    def training_step(self, batch, number):
        if number == 1 and self.global_rank == 0:
            raise KeyError("a mistake of the user")
        return super().training_step(batch, number)


def fail():
    """The exception of a run in which rank 0 fails, while the others wait up to 0.5 s."""
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=ZeroShardStrategy({"watchdog_s": 0.5}), logger=False
    )
    with pytest.raises((KeyError, RuntimeError)) as caught:
        trainer.fit(Failing(), loader())
    return str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_the_exception_of_a_rank_is_not_hidden_by_the_end_of_the_run(ranks):
    failed, waited = ranks(2, fail)
    assert "a mistake of the user" in failed
    assert "rank 1 of 2 gave up" in waited


@on_ranks(2)
def test_the_gradient_hook_of_the_strategy_runs_and_what_belongs_to_ddp_is_refused():
    seen = {"calls": 0}

    def hook(state, bucket):
        state["calls"] += 1
        return allreduce_hook(None, bucket)

    want, _ = fit(ZeroShardStrategy({"stage": 1}), None, epochs=1)
    strategy = ZeroShardStrategy({"stage": 1}, ddp_comm_state=seen, ddp_comm_hook=hook)
    ours, _ = fit(strategy, None, epochs=1)
    assert seen["calls"] >= 6
    assert ours.losses == pytest.approx(want.losses, abs=1e-6)
    for options, text in (
        ({"ddp_comm_wrapper": fp16_compress_wrapper}, r"ddp_comm_wrapper: .*give wrapper\(hook\)"),
        ({"model_averaging_period": 2}, "model_averaging_period: expected None, got 2"),
    ):
        with pytest.raises(ValueError, match=text):
            fit(ZeroShardStrategy(**options), None)


REFUSED = [
    ({"mesh": {"pp": 2}}, {}, "the strategy of Lightning: expected mesh.pp=1, got 2"),
    ({"mesh": {"tp": 2}}, {}, "mesh.tp: the strategy of Lightning gives each process other data"),
    ({"loader": {"num_workers": 2}}, {}, "set num_workers and the like of your DataLoader"),
    ({}, {"gradient_clip_val": 1.0}, "set clip_grad_norm in the config"),
    ({}, {"precision": "bf16-mixed"}, "set precision in the config"),
    ({"gradient_accumulation_steps": 2}, {}, "set accumulate_grad_batches"),
    ({"device": "cuda"}, {}, "set accelerator and devices"),
]


@on_ranks(1)
def test_settings_in_the_wrong_place_are_named():
    for config, options, text in REFUSED:
        with pytest.raises(ValueError, match=text):
            fit(ZeroShardStrategy(config), None, **options)


@pytest.mark.long
@on_ranks(2)
def test_a_trainer_of_lightning_becomes_one_with_the_same_losses_and_model(tmp_path):
    modules = []
    for first_line in ("Lightning", "zeroshard with Lightning"):
        kind = functools.partial(Trainer, accelerator="cpu", devices=2, **QUIET)
        module = Classifier()
        torch.manual_seed(1)
        execute("Lightning", first_line, tmp_path, {"Trainer": kind, "module": module, "loader": loader()})
        modules.append(module)
    ddp, ours = modules
    assert len(ddp.losses) == 12
    assert ours.losses == ddp.losses
    assert largest_difference(ours.state_dict(), ddp.state_dict()) == 0
