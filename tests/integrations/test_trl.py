"""TRL's trainer over an engine: the losses of DDP over the same data."""

import pytest

pytest.importorskip("trl")

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tests.integrations.runs import (
    LENGTH,
    VOCABULARY,
    accelerate_state,
    arguments,
    full_state_dict,
    largest_difference,
    logged,
)
from tests.ranks import on_ranks
from zeroshard.integrations.transformers import ZeroShardMixin

OPTIONS = {"max_grad_norm": 0, "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}


class ZeroShardSFTTrainer(ZeroShardMixin, SFTTrainer):
    pass


def build_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))


def tokenizer():
    words = {f"w{number}": number for number in range(VOCABULARY - 2)}
    words |= {"<eos>": VOCABULARY - 2, "<unk>": VOCABULARY - 1}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>", pad_token="<eos>")


def rows():
    """Sixteen sequences of one length."""
    ids = torch.randint(VOCABULARY - 2, (16, LENGTH), generator=torch.Generator().manual_seed(4))
    return [{"input_ids": row, "labels": row} for row in ids.tolist()]


def sft(kind, folder, **more):
    trainer = kind(
        model=build_model(),
        args=arguments(folder, SFTConfig, bf16=False, **OPTIONS),
        train_dataset=Dataset.from_list(rows()),
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_a_trainer_of_trl_has_the_losses_of_ddp(tmp_path):
    with accelerate_state():
        theirs = sft(SFTTrainer, tmp_path)
        expected, state = logged(theirs), full_state_dict(theirs)
    with accelerate_state():
        ours = sft(ZeroShardSFTTrainer, tmp_path, zeroshard_config={"stage": 3})
        losses, own_state = logged(ours), full_state_dict(ours)
        ours.engine.close()
    assert dist.get_rank() or len(losses) == 4  # rank 0 logs
    assert losses == expected
    assert largest_difference(own_state, state) == 0
