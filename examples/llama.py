"""The small Llama of the examples with other libraries, and its text."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blocks import TextDatasets, text_datasets
from text import ByteTokenizer, python_documentation

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "zeroshard")
SEQ_LEN = 128
"""Bytes in a block of text."""


def small_llama() -> LlamaForCausalLM:
    """Return a model with random weights, the same ones on all ranks, whose tokens are bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=SEQ_LEN,
        bos_token_id=None,
        eos_token_id=ByteTokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def read_text() -> TextDatasets:
    """Return blocks of Python's documentation."""
    return text_datasets(python_documentation(CACHE), ByteTokenizer(), seq_len=SEQ_LEN)


def parser(description: str | None, steps: int = 60) -> argparse.ArgumentParser:
    """Return a parser with the options that the examples share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--steps", type=int, default=steps, metavar="N", help="optimizer steps (%(default)s)")
    made.add_argument("--stage", type=int, default=3, choices=range(4), help="(%(default)s)")
    return made
