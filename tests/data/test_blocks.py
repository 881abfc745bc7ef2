"""Blocks of packed documents: their losses are those of the documents alone, at any number of ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed
from hypothesis import given
from torch.utils.data import default_collate

from blocks import (
    Blocks,
    Collator,
    TextDatasets,
    best_fit,
    check_separation,
    collator,
    cut,
    evaluation_batches,
    text_datasets,
)
from tests.data.tokenizers import CHATML, Bytes, letters

SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
LLAMA = SIZES | {"num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 32}
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": 3},
    "gpt2": {"vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32},
    "opt": LLAMA | {"ffn_dim": 32, "word_embed_proj_dim": 16},
}


def small_model(family: str, attention: str = "sdpa") -> Any:
    """Return a small model with weights large enough for attention to matter."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def write(folder: Path, texts: list[str]) -> Path:
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def chats(folder: Path) -> Path:
    """Conversations whose answers are of very different lengths."""
    file = folder / "chats.jsonl"
    lines = []
    for number in range(1, 13):
        question = {"role": "user", "content": "q" * (13 - number)}
        lines.append({"messages": [question, {"role": "assistant", "content": "a" * number}]})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def all_of(blocks: Blocks) -> list[dict[str, torch.Tensor]]:
    return [blocks[index] for index in range(len(blocks))]


def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each label of [rows, length], 0 where there is none."""
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), shifted, reduction="none")


# ------------------------------------------------------------------------------------- documents are apart


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("mistral", "sdpa"), ("gpt2", "eager")])
@torch.no_grad()
def test_the_loss_of_each_token_is_that_of_its_document_alone(
    tmp_path: Path, family: str, attention: str, is_flat: bool
) -> None:
    texts = ["a", "bc", "dogs bark", "and cats do not", "x" * 9, "so it is", "what else", "hm"]
    tokenizer = letters()
    blocks = text_datasets(
        write(tmp_path, texts), tokenizer, seq_len=18, held_out=0, cache_dir=tmp_path / "cache"
    ).train
    assert len(blocks) < len(texts) - 2
    model = small_model(family, attention)
    batch = Collator(is_flat=is_flat)(all_of(blocks))
    packed = losses(model(**batch).logits, batch["labels"])
    alone = []
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        alone += losses(model(input_ids=ids).logits, ids)[0, :-1].tolist()
    found = sorted(packed[packed != 0].tolist())
    assert len(found) == blocks.num_labels == len(alone)
    torch.testing.assert_close(found, sorted(alone), rtol=1e-4, atol=1e-5)


def test_a_model_that_lets_documents_attend_to_each_other_is_refused() -> None:
    check_separation(small_model("llama").train(), Collator())
    check_separation(small_model("gpt2", "eager"), Collator(is_flat=True))
    with pytest.raises(ValueError, match=r"OPTForCausalLM crosses packed documents.*pack=False"):
        check_separation(small_model("opt"), Collator())
    with pytest.raises(ValueError, match="LlamaForCausalLM crosses"):
        check_separation(small_model("llama"), default_collate)  # which leaves use_cache to the model


# ------------------------------------------------------------------------------------------ weights of losses


def test_with_the_blocks_the_collator_gives_each_label_the_same_weight(tmp_path: Path) -> None:
    blocks = text_datasets(
        chats(tmp_path), letters(CHATML), seq_len=20, held_out=0, cache_dir=tmp_path / "cache"
    ).train
    model = small_model("llama")
    batches = [all_of(blocks)[start : start + 2] for start in range(0, len(blocks) // 2 * 2, 2)]
    assert len(batches) > 2
    weighed = torch.stack([model(**collator(model, blocks)(batch)).loss for batch in batches])
    plain = torch.stack([model(**collator(model)(batch)).loss for batch in batches])
    nums = torch.tensor([sum(int((block["labels"] != -100).sum()) for block in batch) for batch in batches])
    per_batch = 2 * blocks.num_labels / len(blocks)
    torch.testing.assert_close(weighed, plain * nums / per_batch)
    assert len(set(nums.tolist())) > 1


@pytest.mark.parametrize("num_ranks", [1, 3])
@torch.no_grad()
def test_the_evaluation_of_all_ranks_is_the_mean_over_all_labels(tmp_path: Path, num_ranks: int) -> None:
    blocks = text_datasets(
        chats(tmp_path), letters(CHATML), seq_len=20, held_out=0, cache_dir=tmp_path / "cache"
    ).train
    model = small_model("llama")
    batch = Collator()(all_of(blocks))
    want = losses(model(**batch).logits, batch["labels"]).sum() / blocks.num_labels
    total, num_labels, num_batches = 0.0, 0, set()
    for rank in range(num_ranks):
        batches = list(
            evaluation_batches(blocks, 2, rank=rank, num_ranks=num_ranks, collate_fn=collator(model))
        )
        num_batches.add(len(batches))
        total += sum(model(**batch).loss.item() * number for batch, number in batches)
        num_labels += sum(number for _, number in batches)
    assert len(num_batches) == 1
    assert num_labels == blocks.num_labels
    assert total / num_labels == pytest.approx(want.item(), rel=1e-5)


# --------------------------------------------------------------------------------------- loaders and engines


def test_each_document_is_either_held_out_or_trained_on_whatever_files_and_blocks_are(tmp_path: Path) -> None:
    texts = [f"{number:03d}" * (number % 5 + 1) for number in range(100)]
    file = write(tmp_path, texts)
    train, held_out = (set(documents_of(part)) for part in datasets(file, tmp_path, seq_len=64))
    assert train | held_out == set(texts)
    assert not train & held_out
    assert 0.05 < sum(map(len, held_out)) / sum(map(len, texts)) <= 0.1
    renamed = file.rename(tmp_path / "renamed.jsonl")
    assert set(documents_of(datasets(renamed, tmp_path, seq_len=20)[1])) == held_out


def datasets(file: Path, folder: Path, seq_len: int) -> TextDatasets:
    return text_datasets(file, Bytes(), seq_len=seq_len, held_out=0.1, cache_dir=folder / "cache")


def documents_of(blocks: Blocks) -> list[str]:
    """The texts of documents that are at most a block long and have no zero byte."""
    found = []
    for block in all_of(blocks):
        starts = (block["position_ids"] == 0).nonzero().flatten().tolist()
        for start, end in itertools.pairwise([*starts, blocks.seq_len]):
            found.append(bytes(block["input_ids"][start:end].tolist()).decode())
    return [text for text in found if text.strip("\0")]


# ------------------------------------------------------------------------------------------ pieces and blocks

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=40).map(np.array)


@given(LENGTHS, st.integers(2, 12))
def test_each_token_but_the_first_of_a_document_is_a_label_once(lengths: np.ndarray, seq_len: int) -> None:
    starts = np.cumsum(lengths) - lengths
    pieces = cut(starts, lengths, seq_len)
    labels = [at for start, length in pieces for at in range(start + 1, start + length)]
    firsts = set(starts.tolist())
    assert labels == [at for at in range(lengths.sum()) if at not in firsts]
    assert ((pieces[:, 1] >= 2) & (pieces[:, 1] <= seq_len)).all()


@given(st.lists(st.integers(2, 16), max_size=60).map(lambda values: np.array(values, dtype=np.int64)))
def test_blocks_hold_each_piece_once_and_no_two_blocks_could_be_one(lengths: np.ndarray) -> None:
    packed = best_fit(lengths, 16)
    assert sorted(packed.order.tolist()) == list(range(len(lengths)))
    sums = [
        lengths[packed.order[first:end]].sum()
        for first, end in zip(packed.firsts[:-1], packed.firsts[1:], strict=True)
    ]
    assert all(0 < total <= 16 for total in sums)
    # A new block is begun only for a piece that fits into none, so no two blocks could be one.
    assert all(one + other > 16 for one, other in itertools.pairwise(sorted(sums)))
