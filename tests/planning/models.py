"""Models of these tests."""

from __future__ import annotations

import transformers


def llama(blocks: int = 4, width: int = 256, vocabulary: int = 8192) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=5 * width // 2,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config.architectures = ["LlamaForCausalLM"]
    return transformers.LlamaForCausalLM(config)
