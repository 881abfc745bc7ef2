"""The Trainer of transformers over an engine; what docs/migrating.md makes of it, and of accelerate."""

import functools
import json
import shutil

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

import zeroshard
from tests.integrations.runs import (
    Texts,
    accelerate_state,
    arguments,
    build_model,
    execute,
    full_state_dict,
    largest_difference,
    logged,
    trainer,
)
from tests.ranks import on_ranks
from zeroshard import Config, OuterStep, Precision
from zeroshard.integrations.transformers import ZeroShardMixin, join_arguments
from zeroshard.optim import OneBitAdam

# ---------------------------------------------------------------------------------- losses and parameters


def trained_beside_ddp(folder, **options):
    """With DDP and at stage 3: losses, norms and the loss of an evaluation; and the parameters."""
    found = []
    for config in (None, {"stage": 3}):
        with accelerate_state():
            ours = trainer(folder, config, **options)
            ours.train()
            numbers = [*logged(ours), *logged(ours, "grad_norm"), ours.evaluate()["eval_loss"]]
            found.append((numbers, full_state_dict(ours)))
    return found


@on_ranks(2)
def test_accumulation_and_clipping_are_those_of_ddp(tmp_path):
    options = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.3}  # the last step has 2
    (expected, state), (numbers, own_state) = trained_beside_ddp(tmp_path, **options)
    assert dist.get_rank() or len(numbers) == 5  # rank 0 logs
    assert numbers == pytest.approx(expected, abs=1e-6)
    assert largest_difference(own_state, state) < 1e-5


class Stream(IterableDataset):
    """Ten micro-batches for each of two ranks, as their number is not known: 5 in an epoch."""

    def __iter__(self):
        texts = Texts(20)
        yield from (texts[index] for index in range(20))


@pytest.mark.long
@on_ranks(2)
def test_micro_batches_at_the_end_of_a_stream_count_in_the_next_epoch_as_with_ddp(tmp_path):
    options = {"gradient_accumulation_steps": 2, "max_steps": 5, "train_dataset": Stream()}
    (expected, _), (losses, _) = trained_beside_ddp(tmp_path, **options)
    assert losses == pytest.approx(expected, abs=1e-5)
    if dist.get_rank() == 0:  # which logs
        assert len(losses) == 11
        assert max(expected[:5]) > 1.5 * min(expected[:5])  # the Trainer logs three losses as one


class ZeroShardSeq2SeqTrainer(ZeroShardMixin, Seq2SeqTrainer):
    pass


@pytest.mark.long
@on_ranks(2)
def test_a_seq2seq_trainer_generates_what_that_of_ddp_does(tmp_path):
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 12}
    found = []
    for kind, more in ((Seq2SeqTrainer, {}), (ZeroShardSeq2SeqTrainer, {"zeroshard_config": {"stage": 3}})):
        torch.manual_seed(0)
        with accelerate_state():
            options = {"predict_with_generate": True, "generation_max_length": 9}
            args = arguments(tmp_path, Seq2SeqTrainingArguments, per_device_eval_batch_size=2, **options)
            model = T5ForConditionalGeneration(T5Config(**sizes, **ids))
            ours = kind(model=model, args=args, train_dataset=Texts(12), **more)
            ours.train()
            found.append(ours.predict(Texts(6)))
    texts, own_texts = (each.predictions.tolist() for each in found)
    assert len(texts) == 8  # of 6: two come twice, so that both ranks have two batches
    assert own_texts == texts
    losses = [each.metrics["test_loss"] for each in found]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@on_ranks(2)
def test_data_that_are_not_divided_among_the_ranks_are_an_error(tmp_path):
    with accelerate_state():
        ours = trainer(tmp_path, {})
        for state in (AcceleratorState, PartialState):
            state._shared_state["num_processes"] = 1
        with pytest.raises(RuntimeError, match=r"zeroshard has 2 ranks, but accelerate .* 1 processes"):
            ours.train()


# ------------------------------------------------------------------------------------------- checkpoints


class StoppedError(Exception):
    pass


class StopAt(TrainerCallback):
    def __init__(self, step):
        self._step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            raise StoppedError


def power():
    return {"gradient_hook": (PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook)}


def signs():
    return {"optimizer_cls_and_kwargs": (OneBitAdam, {"lr": 1e-2, "freeze_step": 2})}


def local_steps():
    return {"outer_step": OuterStep.diloco(every=3)}  # replicas are apart in the checkpoint of step 4


@pytest.mark.long_where(make=[power, signs])
@pytest.mark.parametrize(
    ("make", "stage", "max_grad_norm"), [(dict, 3, 1), (power, 1, 1), (local_steps, 3, 1), (signs, 0, 0)]
)
@pytest.mark.filterwarnings("ignore:OneBitAdam")
@on_ranks(2, timeout=120)
def test_a_new_trainer_goes_on_to_the_same_bits_from_the_last_complete_checkpoint(
    tmp_path, make, stage, max_grad_norm
):
    """Train; train again and stop after 5 of 6 steps; go on in a new Trainer from the last checkpoint."""
    options = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}
    options |= {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": max_grad_norm}
    config = {"stage": stage}
    with accelerate_state():
        whole = trainer(tmp_path / "whole", config, given=make(), **options)
        whole.train()
        expected = full_state_dict(whole)
        whole.engine.close()
        stopped = trainer(tmp_path / "stopped", config, callbacks=[StopAt(5)], given=make(), **options)
        with pytest.raises(StoppedError):
            stopped.train()
        stopped.engine.close(restore=False)
        resumed = trainer(tmp_path / "stopped", config, given=make(), **options)
        if resumed.args.process_index == 0:  # as if killed in the middle of the next save
            shutil.copytree(tmp_path / "stopped/checkpoint-4", tmp_path / "stopped/checkpoint-5")
            (tmp_path / "stopped/checkpoint-5/trainer_state.json").write_text('{"global_step": 5, ')
        resumed.accelerator.wait_for_everyone()
        resumed.train(resume_from_checkpoint=True)
    assert largest_difference(full_state_dict(resumed), expected) == 0
    assert logged(resumed) == logged(whole)
    assert logged(resumed, "step")[: len(logged(whole))] == list(range(1, len(logged(whole)) + 1))
    assert resumed.engine.global_step == 6


@on_ranks(2, timeout=120)
def test_an_epoch_whose_samples_are_drawn_from_a_default_generator_goes_on_with_the_same_ones(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "train_sampling_strategy": "group_by_length"}
    with accelerate_state():
        whole = trainer(tmp_path, {"stage": 3}, **options)
        whole.train()
        expected = full_state_dict(whole)
        whole.engine.close()
        resumed = trainer(tmp_path, {"stage": 3}, **options)
        resumed.train(f"{tmp_path}/checkpoint-1")
    assert largest_difference(full_state_dict(resumed), expected) == 0


@pytest.mark.long
@on_ranks(2, timeout=120)
def test_early_stopping_loads_the_best_model_which_from_pretrained_reads(tmp_path):
    """Train with a learning rate that spoils the model."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 2}
    with accelerate_state():
        early = EarlyStoppingCallback(early_stopping_patience=2)
        ours = trainer(tmp_path, {}, callbacks=[early], learning_rate=0.5, num_train_epochs=5, **options)
        ours.train()
        losses = logged(ours, "eval_loss")
        after = ours.evaluate()["eval_loss"]
        ours.save_model(str(tmp_path / "final"))
        expected = full_state_dict(ours)
        predicted = ours.predict(Texts(5)).predictions
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 30
    assert after == min(losses)
    loaded = dict(GPT2LMHeadModel.from_pretrained(tmp_path / "final").state_dict())
    assert largest_difference(expected, loaded) == 0
    assert predicted.shape == (5, 12, 64)
    kept = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert kept == {f"checkpoint-{best + 1}", f"checkpoint-{len(losses)}"}


@on_ranks(1)
def test_a_checkpoint_of_another_trainer_is_refused_by_name(tmp_path):
    build_model().save_pretrained(tmp_path / "checkpoint-3")
    state = {"global_step": 3, "train_batch_size": 2}
    (tmp_path / "checkpoint-3/trainer_state.json").write_text(json.dumps(state))
    with accelerate_state(), pytest.raises(ValueError, match=r"checkpoint-3.*expected a checkpoint"):
        trainer(tmp_path, {}).train(resume_from_checkpoint=True)


# --------------------------------------------------------------------------------------- half precision


def trained_in(dtype, folder, config, **options):
    """A Trainer after its training; its engine computes in a dtype over float32."""
    with accelerate_state():
        ours = trainer(folder, config, **options)
        ours.train()
    assert ours.engine.config.precision.param_dtype == dtype
    assert next(ours.model.parameters()).dtype == torch.float32
    return ours


@on_ranks(2)
def test_mixed_precision_of_the_arguments_is_that_of_the_engine(tmp_path):
    plain = logged(trained_in(None, tmp_path, {}))
    half = logged(trained_in(torch.bfloat16, tmp_path, {}, bf16=True))
    assert dist.get_rank() or half != plain
    assert half == pytest.approx(plain, abs=0.02)


@pytest.mark.long
@on_ranks(2)
def test_a_step_that_overflows_in_float16_leaves_the_schedule_where_it_is(tmp_path):
    config = {"precision": {"param_dtype": "fp16", "loss_scale": {"start": 2.0**40}}}
    ours = trained_in(torch.float16, tmp_path, config, fp16=True, gradient_accumulation_steps=2)
    assert (ours.engine.global_step, ours.engine.skipped_steps, ours.state.global_step) == (0, 3, 3)
    assert dist.get_rank() or logged(ours, "learning_rate") == [1e-2] * 3


# ----------------------------------------------------------------------------------- contradictory settings


EARLY = {"stage": 3, "offload": {"optimizer": "cpu", "step_in_backward": True}}
BATCH = {"auto_find_batch_size": True, "bf16_full_eval": True}
OTHERS = {"deepspeed": "ds.json", "fsdp": "full_shard"}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"precision": "fp16"}, {"bf16": True}, "param_dtype: expected bfloat16, got float16"),
        ({"recompute": "unit"}, {"activation_checkpointing": True}, "recompute: expected 'none', got 'unit'"),
        ({}, BATCH, "bf16_full_eval: expected False, got True.*auto_find_batch_size"),
        ({}, {"accelerator_config": {"even_batches": False}}, "even_batches: expected True"),
        ({}, {"save_on_each_node": True}, "save_on_each_node"),
        ({}, {"torch_compile": True}, r"torch_compile.*Config\(compile=True\) compiles units"),
        ({}, OTHERS, "deepspeed: expected None.*fsdp: expected"),
        (EARLY, {"max_grad_norm": 0.5}, "max_grad_norm: expected 0, got 0.5"),
    ],
)
def test_settings_that_contradict_each_other_are_named(tmp_path, config, options, message):
    with accelerate_state():
        args = arguments(tmp_path, **({} if options is OTHERS else options))
        vars(args).update(OTHERS if options is OTHERS else {})
        with pytest.raises(ValueError, match=message):
            join_arguments(Config.from_dict(config), args)


def test_settings_of_which_the_arguments_decide_are_refused_before_anything_is_made():
    counts = {"gradient_accumulation_steps": 2, "checkpoint": {"keep_last": 1}, "loader": {"num_workers": 1}}
    for config, message in (
        ({"mesh": {"tp": 2}}, r"^mesh\.tp: the Trainer gives each process other data"),
        ({"mesh": {"pp": 2}}, r"^the Trainer: expected mesh\.pp=1, got 2"),
        (counts, "gradient_accumulation_steps: expected 1, got 2; set .*loader: .*set save_total_limit of"),
        ({"device": "cuda", "clip_grad_norm": 0.5, "micro_batch_size": 3}, "max_grad_norm.*per_dev.*use_cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            ZeroShardSeq2SeqTrainer(zeroshard_config=config)


def test_what_the_arguments_say_is_taken_over(tmp_path):
    config = Config(stage=2, precision=Precision(reduce_dtype="bf16"))
    options = {"bf16": True, "gradient_accumulation_steps": 3, "max_grad_norm": 0.5}
    with accelerate_state():
        joined = join_arguments(config, arguments(tmp_path, **options))
    precision = Precision(param_dtype="bf16", reduce_dtype="bf16")
    assert joined == Config(
        stage=2, precision=precision, gradient_accumulation_steps=3, micro_batch_size=2, device="cpu"
    )


# --------------------------------------------------------------------------------------- docs/migrating.md


def assert_same(folder, losses_by_first_line):
    """Losses and the model that is saved are those of the script before."""
    if dist.is_initialized():
        dist.barrier()  # rank 0 writes them
    theirs, ours = (
        GPT2LMHeadModel.from_pretrained(folder / name / "out").state_dict() for name in losses_by_first_line
    )
    expected, losses = losses_by_first_line.values()
    assert len(losses) == 4
    assert losses == pytest.approx(expected, abs=1e-6)
    assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.long
@on_ranks(2)
def test_a_trainer_becomes_one_with_the_same_losses_and_model(tmp_path):
    losses = {}
    for first_line in ("Trainer", "zeroshard with a Trainer"):
        names = {"Trainer": Trainer, "model": build_model(), "resume": None}
        names |= {"train_dataset": Texts(16), "eval_dataset": Texts(4)}
        with accelerate_state():
            names["args"] = arguments(tmp_path, num_train_epochs=2, gradient_accumulation_steps=2)
            execute("the Trainer of transformers and TRL", first_line, tmp_path, names)
        losses[first_line] = logged(names["trainer"])
    assert_same(tmp_path, losses)


@on_ranks(2)
def test_an_accelerate_loop_becomes_one_with_the_same_losses_and_model(tmp_path):
    losses = {}
    # accelerate steps a schedule once for each process
    for first_line, pace in (("accelerate", 2), ("zeroshard with accelerate", 1)):
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        names = {
            "Accelerator": functools.partial(Accelerator, cpu=True),
            "zeroshard": zeroshard,
            "model": model,
            "optimizer": optimizer,
            "loader": DataLoader(Texts(16), batch_size=2),
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, pace, gamma=0.5),
            "losses": losses.setdefault(first_line, []),
        }
        with accelerate_state():
            execute("accelerate", first_line, tmp_path, names)
        assert names["optimizer"].param_groups[0]["lr"] == 1e-2 * 0.5**2
    assert_same(tmp_path, losses)
