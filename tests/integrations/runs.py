"""Small models, data and Trainers for the tests of integrations; run on ranks."""

import os
from contextlib import chdir, contextmanager
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.migrating import SECTIONS, blocks
from zeroshard.integrations.transformers import ZeroShardMixin

VOCABULARY, LENGTH = 64, 12


class ZeroShardTrainer(ZeroShardMixin, Trainer):
    pass


class Texts(Dataset):
    """Sequences of token ids [LENGTH]; the first 0 to 8 labels are masked, so batches have unequal counts."""

    def __init__(self, number):
        generator = torch.Generator().manual_seed(5)
        self._ids = torch.randint(VOCABULARY, (number, LENGTH), generator=generator)

    def __len__(self):
        return len(self._ids)

    def __getitem__(self, index):
        labels = self._ids[index].clone()
        labels[: index * 5 % 9] = -100
        return {"input_ids": self._ids[index], "labels": labels}


def build_model(dropout=0.1):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))


def arguments(folder, kind=TrainingArguments, **options):
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "log_level": "error", "logging_steps": 1}
    common = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "num_train_epochs": 1}
    return kind(str(folder), **quiet | common | {"save_strategy": "no"} | options)


def trainer(folder, config=None, *, train_dataset=None, callbacks=None, given=(), **options):
    """A Trainer over the texts: with DistributedDataParallel, or sharded where there is a config.

    It is given further arguments of the Trainer, and options of its TrainingArguments.
    """
    kind, more = (Trainer, {}) if config is None else (ZeroShardTrainer, {"zeroshard_config": config})
    return kind(
        model=build_model(),
        args=arguments(folder, **options),
        train_dataset=train_dataset or Texts(24),
        eval_dataset=Texts(6),
        callbacks=callbacks,
        **more,
        **dict(given),
    )


def logged(trainer, key="loss"):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def full_state_dict(trainer):
    """The whole model on rank 0."""
    engine = getattr(trainer, "engine", None)
    if engine is not None:
        return engine.full_state_dict()
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def largest_difference(one, other):
    """The largest difference of two state dicts; 0.0 where a rank has an empty one."""
    if not one or not other:
        return 0.0
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def execute(section, first_line, folder, names):
    """Execute a block of docs/migrating.md in a folder of its own; `names` gets its names."""
    (block,) = blocks(SECTIONS[section], first_line)
    Path(folder, first_line).mkdir(exist_ok=True, parents=True)
    with chdir(Path(folder, first_line)):
        exec(block, names)


@contextmanager
def accelerate_state():
    """Forget what accelerate keeps for a whole process, which serves other tests afterwards."""
    try:
        yield
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
