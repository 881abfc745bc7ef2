"""The small Llama of the examples, and its text."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blocks import TextDatasets, text_datasets
from text import ByteTokenizer, python_documentation

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "zeroshard")
HEAD_DIM = 32
SEQ_LEN = 128
"""Bytes in a block of text."""


def small_llama(hidden: int = 64, layers: int = 2, seq_len: int = SEQ_LEN, seed: int = 0) -> LlamaForCausalLM:
    """Return a model with random weights, the same ones on all ranks, whose tokens are bytes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        max_position_embeddings=seq_len,
        bos_token_id=None,
        eos_token_id=ByteTokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def read_text(seq_len: int = SEQ_LEN) -> TextDatasets:
    """Return blocks of Python's documentation."""
    return text_datasets(python_documentation(CACHE), ByteTokenizer(), seq_len=seq_len)


def parser(description: str | None, steps: int = 60) -> argparse.ArgumentParser:
    """Return a parser with the options that the examples share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--steps", type=int, default=steps, metavar="N", help="optimizer steps (%(default)s)")
    made.add_argument("--stage", type=int, default=3, choices=range(4), help="(%(default)s)")
    return made
