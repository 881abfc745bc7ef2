"""TRL's trainer over an engine: the losses of DDP, and those of a plain loop over the same data.

The other libraries are in files of their own, and in `test_documented.py`.
"""

import pytest

pytest.importorskip("trl")

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import zeroshard
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
    """Sixteen sequences of one length, so that a mean over a rank's tokens needs no counts of others."""
    ids = torch.randint(VOCABULARY - 2, (16, LENGTH), generator=torch.Generator().manual_seed(4))
    return [{"input_ids": row, "labels": row} for row in ids.tolist()]


def batches():
    """The micro-batches of this rank as accelerate deals them out: 0 and 2 on the first of two ranks."""
    tensors = [{key: torch.tensor(value) for key, value in row.items()} for row in rows()]
    stacked = [{key: torch.stack([row[key] for row in pair]) for key in pair[0]}
               for pair in zip(tensors[::2], tensors[1::2], strict=True)]  # fmt: skip
    return stacked[dist.get_rank() :: dist.get_world_size()]


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)


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
def test_a_trainer_of_trl_has_the_losses_of_ddp_and_of_a_plain_loop(tmp_path):
    with accelerate_state():
        theirs = sft(SFTTrainer, tmp_path)
        expected, state = logged(theirs), full_state_dict(theirs)
    with accelerate_state():
        ours = sft(ZeroShardSFTTrainer, tmp_path, zeroshard_config={"stage": 3})
        losses, own_state = logged(ours), full_state_dict(ours)
        ours.engine.close()
    engine = zeroshard.initialize(model := build_model(), optimizer_of(model), {"stage": 3}).engine
    plain = []
    for batch in batches():
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        dist.all_reduce(total := loss.detach().clone())
        plain.append(total.item() / 2)
    plain_state = engine.full_state_dict()
    assert len(plain) == 4
    assert losses == expected
    assert largest_difference(own_state, state) == 0
    if dist.get_rank() == 0:  # which logs; TRL computes the loss by itself, in chunks
        assert losses == pytest.approx(plain, abs=1e-5)
        assert largest_difference(own_state, plain_state) < 1e-4
