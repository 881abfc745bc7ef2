"""Batches of blocks for a model of transformers, for evaluation, and for a check of the attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.data.blocks import IGNORED, Block, Blocks
from zeroshard.data.microbatch import to_device

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """A function that makes a batch of blocks for a causal language model of transformers.

    A batch has `use_cache=False`: with a cache, transformers lets packed documents attend to each other.
    """

    is_flat: bool = False
    """True for one row [1, batch * seq_len] of all blocks, which flash attention needs to keep documents
    apart; False for [batch, seq_len]."""
    labels_per_block: float | None = None
    """The sum of the losses of a batch is divided by this number times its blocks; None for the mean over the
    labels of the batch."""

    def __call__(self, samples: Sequence[Block]) -> dict[str, Any]:
        batch: dict[str, Any] = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        if self.is_flat:
            batch = {key: value.flatten()[None] for key, value in batch.items()}
        if self.labels_per_block is not None:
            batch["num_items_in_batch"] = self.labels_per_block * len(samples)
        return batch | {"use_cache": False}


def collator(model: Any, blocks: Blocks | None = None) -> Collator:
    """Return the collator for a model: flat if its attention is a flash attention of transformers.

    Args:
        model: a model of transformers, or an engine over one.
        blocks: the dataset, so that each label has the same weight in training: the loss of a batch is its
            sum divided by the mean number of labels of as many blocks. None for the mean over the labels of
            each batch, in which a label weighs more in a batch that has fewer.
    """
    owners = (model, getattr(model, "module", None))  # the config of an engine is zeroshard's
    configs = (getattr(owner, "config", None) for owner in owners)
    attention = " ".join(str(getattr(config, "_attn_implementation", "")) for config in configs)
    per_block = None if blocks is None else blocks.num_labels / len(blocks)
    return Collator(is_flat="flash" in attention, labels_per_block=per_block)


def evaluation_batches(
    blocks: Blocks,
    batch_size: int,
    *,
    rank: int,
    num_ranks: int,
    collate_fn: Callable[[Sequence[Block]], dict[str, Any]],
    device: torch.device | str = _CPU,
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield this rank's batches and their numbers of labels, equally many batches on each rank.

    A rank that has no block left gets the first one again, with 0 as its number. So the mean loss over all
    labels is, with both sums taken over all batches of all ranks, sum(loss * number) / sum(number). The
    collator must be one for means.
    """
    most = math.ceil(len(blocks) / num_ranks)  # blocks of rank 0
    own = range(rank, len(blocks), num_ranks)
    for start in range(0, most, batch_size):
        indices = own[start : start + batch_size]
        batch = collate_fn([blocks[index] for index in indices or (0,)])
        num_labels = int((batch["labels"] != IGNORED).sum()) if indices else 0
        yield to_device(batch, torch.device(device)), num_labels


@torch.no_grad()
def check_separation(model: Any, collate_fn: Callable[[Sequence[Block]], Mapping[str, Any]]) -> None:
    """Prove on a tiny batch that a model keeps packed documents apart; all ranks of an engine call it.

    Two documents share a row. The first one is changed in one of three rows, and the logits of the second
    must not change. Takes one forward of 3 rows with 8 tokens with the ids 0, 1 and 2.

    Args:
        model: a model of transformers, or an engine over one. It comes back in the mode it was in.
        collate_fn: the collator that training uses.

    Raises:
        ValueError: the model lets documents attend to each other: use `text_datasets(..., pack=False)`.
    """
    positions = torch.arange(4).repeat(2)
    rows = [torch.tensor([*first, 2, 0, 1, 2]) for first in ([0, 1, 2, 0], [0, 1, 2, 0], [1, 2, 0, 1])]
    samples = [{"input_ids": row, "labels": row, "position_ids": positions} for row in rows]
    # An engine tells its own device: its parameters may lie on another one.
    device = getattr(model, "device", None) or next(iter(model.parameters())).device
    mode = model.training
    model.eval()
    try:
        logits = model(**to_device(collate_fn(samples), device)).logits.detach().float().view(3, 8, -1)
    finally:
        model.train(mode)
    second = logits[:, 4:]
    noise, leak = ((second[0] - second[other]).abs().max().item() for other in (1, 2))
    if leak > 10 * noise + 1e-6 * second.abs().max().item():
        name = type(getattr(model, "module", model)).__name__
        raise ValueError(
            f"the attention of {name} crosses packed documents: logits changed by {leak:.3g} "
            "with the document before; expected text_datasets(..., pack=False) with this model"
        )
