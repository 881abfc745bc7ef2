"""A Trainer of Lightning with ZeroShardStrategy."""

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from tests.integrations.classifier import Classifier, loader
from tests.integrations.runs import largest_difference
from zeroshard.integrations.lightning import ZeroShardStrategy


def fit(strategy, folder, *, epochs=2, resume=None, **options):
    """Train; the module with its losses, and the Trainer."""
    torch.manual_seed(1)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else [],
        enable_checkpointing=bool(folder),
        **quiet,
        **options,
    )
    module = Classifier()
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    return module, trainer


def beside_ddp(stage, **options):
    ddp, theirs = fit(DDPStrategy(), None, **options)
    ours, trainer = fit(ZeroShardStrategy({"stage": stage}), None, **options)
    parameters = largest_difference(ours.state_dict(), ddp.state_dict())
    return (ddp.losses, ours.losses), parameters, (theirs.global_step, trainer.global_step)


def test_accumulation_is_that_of_ddp(ranks):
    for losses, parameters, steps in ranks(2, beside_ddp, 3, accumulate_grad_batches=4):
        assert losses[1] == pytest.approx(losses[0], abs=1e-6)
        assert parameters < 1e-6
        assert steps == (4, 4)


def stop_and_resume(folder):
    whole, _ = fit(ZeroShardStrategy(), None, epochs=3)
    fit(ZeroShardStrategy(), folder, epochs=2)
    resumed, _ = fit(ZeroShardStrategy(), None, epochs=3, resume=f"{folder}/epoch=1.ckpt")
    return whole.losses, resumed.losses, largest_difference(whole.state_dict(), resumed.state_dict())


def test_a_new_trainer_goes_on_to_the_same_bits(ranks, tmp_path):
    for whole, resumed, difference in ranks(2, stop_and_resume, str(tmp_path)):
        assert resumed == whole[12:]
        assert len(resumed) == 6
        assert difference == 0


class Failing(Classifier):
    def training_step(self, batch, number):
        if number == 1 and self.global_rank == 0:
            raise KeyError("a mistake of the user")
        return super().training_step(batch, number)


def fail():
    """The exception of a run in which rank 0 fails, while the others wait up to 1 s."""
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=ZeroShardStrategy({"watchdog_s": 1}), logger=False
    )
    with pytest.raises((KeyError, RuntimeError)) as caught:
        trainer.fit(Failing(), loader())
    return str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_the_exception_of_a_rank_is_not_hidden_by_the_end_of_the_run(ranks):
    failed, waited = ranks(2, fail)
    assert "a mistake of the user" in failed
    assert "rank 1 of 2 gave up" in waited


def validate_alone(folder):
    """The loss that `fit` has logged at its end, and that of its checkpoint, in a run that only validates."""
    _, trainer = fit(ZeroShardStrategy({"clip_grad_norm": 0.1, "precision": "bf16"}), folder)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    alone = Trainer(accelerator="cpu", devices=2, strategy=ZeroShardStrategy({"precision": "bf16"}), **quiet)
    (found,) = alone.validate(Classifier(), loader(), ckpt_path=f"{folder}/epoch=1.ckpt", verbose=False)
    return trainer.callback_metrics["val_loss"].item(), found["val_loss"]


def test_a_run_that_only_validates_loads_a_checkpoint(ranks, tmp_path):
    for logged, found in ranks(2, validate_alone, str(tmp_path)):
        assert found == logged


REFUSED = [
    ({"mesh": {"pp": 2}}, {}, "the strategy of Lightning: expected mesh.pp=1, got 2"),
    ({"mesh": {"tp": 2}}, {}, "mesh.tp: the strategy of Lightning gives each process other data"),
    ({"loader": {"num_workers": 2}}, {}, "set num_workers and the like of your DataLoader"),
    ({}, {"gradient_clip_val": 1.0}, "set clip_grad_norm in the config"),
    ({}, {"precision": "bf16-mixed"}, "set precision in the config"),
    ({"gradient_accumulation_steps": 2}, {}, "set accumulate_grad_batches"),
    ({"device": "cuda"}, {}, "set accelerator and devices"),
]


def refusals():
    messages = []
    for config, options, _ in REFUSED:
        with pytest.raises(ValueError, match=r".") as caught:
            fit(ZeroShardStrategy(config), None, **options)
        messages.append(str(caught.value))
    return messages


def test_settings_in_the_wrong_place_are_named(ranks):
    (messages,) = ranks(1, refusals)
    for message, (*_, text) in zip(messages, REFUSED, strict=True):
        assert text in message
