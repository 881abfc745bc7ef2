"""Batches: blocks of text, the loader and micro-batches."""

from zeroshard.data.blocks import (
    Blocks,
    Collator,
    TextDatasets,
    check_separation,
    collator,
    evaluation_batches,
    text_datasets,
)

__all__ = [
    "Blocks",
    "Collator",
    "TextDatasets",
    "check_separation",
    "collator",
    "evaluation_batches",
    "text_datasets",
]
