"""The models that benchmarks/pipeline.py trains: a Llama, and blocks that sleep.

A job gives the whole model for zeroshard, and a chunk of it, cut by hand, for torch.distributed.pipelining.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from model import build_llama

VOCABULARY = 2048
HEAD = 32


class Llama:
    """A Llama of transformers.

    Args:
        width: of the hidden states.
        num_blocks: decoder layers.
        batch: sequences of a batch.
        length: tokens of a sequence.
        vocabulary: the words, whose logits the last chunk computes beside its blocks.
    """

    cuts = ("layers", "model")

    def __init__(
        self, width: int, num_blocks: int, batch: int, length: int, vocabulary: int = VOCABULARY
    ) -> None:
        self.num_blocks, self._width, self._batch, self._length = num_blocks, width, batch, length
        self._vocabulary = vocabulary

    def model(self) -> transformers.LlamaForCausalLM:
        return build_llama(
            self._width, self.num_blocks, head=HEAD, vocabulary=self._vocabulary, length=self._length
        )

    def chunk(self, blocks: range, cut: str) -> nn.Module:
        return (Layers if cut == "layers" else Shortened)(self.model(), blocks)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(self._vocabulary, (self._batch, self._length), generator=generator)
        return tokens, tokens

    def named(self, inputs: Tensor) -> Any:
        return {"input_ids": inputs}

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    def message_bytes(self, num_microbatches: int) -> int:
        return self._batch // num_microbatches * self._length * self._width * 4


class Layers(nn.Module):
    """A run of the layers of a Llama, called one after the other, without masks and objects of outputs."""

    def __init__(self, model: transformers.LlamaForCausalLM, blocks: range) -> None:
        super().__init__()
        base, is_last = model.model, blocks.stop == len(model.model.layers)
        self.embedding = base.embed_tokens if blocks.start == 0 else None
        self.rotary = base.rotary_emb
        self.layers = base.layers[blocks.start : blocks.stop]
        self.norm, self.head = (base.norm, model.lm_head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        positions = self.rotary(x, torch.arange(x.shape[1], device=x.device).unsqueeze(0))
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=positions)
        return x if self.norm is None else self.head(self.norm(x))


class Shortened(nn.Module):
    """A Llama with a run of its layers and without the modules of other chunks; its own forward runs."""

    def __init__(self, model: transformers.LlamaForCausalLM, blocks: range) -> None:
        super().__init__()
        base = model.model
        self._is_first, self._is_last = blocks.start == 0, blocks.stop == len(base.layers)
        base.layers = base.layers[blocks.start : blocks.stop]
        if not self._is_first:
            base.embed_tokens = None
        if not self._is_last:
            base.norm = nn.Identity()
        self.model = model if self._is_last else base

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.model(**{"input_ids" if self._is_first else "inputs_embeds": x})
        value: Tensor = outputs.logits if self._is_last else outputs.last_hidden_state
        return value


class _Sleep(torch.autograd.Function):
    """Sleep in the forward, and in the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Sleeper(nn.Module):
    """A linear layer whose forward and both halves of its backward sleep for the same time.

    The first half computes the gradient of the input and sleeps there. The second one computes the gradient
    of the weight, and a hook on a view of the weight sleeps.
    """

    def __init__(self, width: int, seconds: float, *, is_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        # With it the first block has a gradient to compute for its input, as one behind an embedding.
        self.start = nn.Parameter(torch.zeros(1)) if is_first else None
        self._seconds = seconds

    def forward(self, input: Tensor) -> Tensor:
        x = input if self.start is None else input + self.start
        x = _Sleep.apply(x, self._seconds, self._seconds)
        weight = self.weight.view_as(self.weight)
        if weight.requires_grad:
            weight.register_hook(lambda _: time.sleep(self._seconds))
        return F.linear(x, weight)


class Sleepers:
    """Blocks that sleep: their times do not depend on the cores, so more ranks than cores run as if alone.

    Args:
        seconds: of the forward, and of each half of the backward, of a block.
        num_blocks: blocks of the model.
        batch: rows of a batch.
    """

    cuts = ("layers",)
    _WIDTH = 64

    def __init__(self, seconds: float, num_blocks: int, batch: int) -> None:
        self.num_blocks, self._seconds, self._batch = num_blocks, seconds, batch

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        blocks = (Sleeper(self._WIDTH, self._seconds, is_first=n == 0) for n in range(self.num_blocks))
        return nn.Sequential(*blocks)

    def chunk(self, blocks: range, cut: str) -> nn.Module:
        return self.model()[blocks.start : blocks.stop]

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(2, self._batch, self._WIDTH, generator=generator)
        return values[0], values[1]

    def named(self, inputs: Tensor) -> Any:
        return inputs

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        return F.mse_loss(output, targets)

    def message_bytes(self, num_microbatches: int) -> int:
        return self._batch // num_microbatches * self._WIDTH * 4


Job = Llama | Sleepers
"""A model and its batches; all engines have the same. `cuts` are the ways in which chunks are cut by hand; of
these the first one takes the least time."""
