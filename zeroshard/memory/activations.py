"""Bytes of activations in a decoder-only transformer, and those that tensor ranks send for them.

The backward of a block needs so many tensors of tokens x width elements, in the compute dtype:

    whole on each rank    5    the inputs of both norms and of both divided pairs, and dropout masks
    divided over tp      12    queries, keys, values and attention (4), and twice 4 x width behind it

In 16 bits that is 10 + 24 / tp bytes for each element, as the source has it. Attention scores are left out:
fused kernels compute them again. With recomputation of each block only its input is kept, and one block is
there whole.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equations 2,
4 and 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from zeroshard.memory.typical import typical_sizes

_WHOLE, _DIVIDED = 5, 12
_EXCHANGES = 4
"""Sums over the tensor ranks for each block: 2 in the forward, 2 in the backward."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a transformer."""

    depth: int
    width: int

    @staticmethod
    def of(model_or_num_params: nn.Module | float) -> Blocks:
        """Read the sizes of a model of transformers, or take those of a typical one.

        Raises:
            ValueError: the config of the model does not tell them.
        """
        if not isinstance(model_or_num_params, nn.Module):
            sizes = typical_sizes(int(model_or_num_params))
            return Blocks(sizes.depth, sizes.width)
        config: Any = getattr(model_or_num_params, "config", None)
        depth, width = (getattr(config, key, None) for key in ("num_hidden_layers", "hidden_size"))
        if not isinstance(depth, int) or not isinstance(width, int):
            raise ValueError(
                "num_tokens: expected a model whose config has num_hidden_layers and hidden_size, got "
                f"{type(model_or_num_params).__name__}"
            )
        return Blocks(depth, width)

    def bytes_held(
        self, num_tokens: int, itemsize: int, *, tp: int = 1, sequence: bool = False, recomputes: bool = False
    ) -> int:
        """Bytes of activations of a rank between the forward and the backward of a micro-batch.

        Args:
            num_tokens: tokens of the micro-batch.
            itemsize: bytes of an element.
            tp: tensor ranks.
            sequence: True if the values between divided pairs are divided along the sequence.
            recomputes: True if only the inputs of blocks are kept.
        """
        one = num_tokens * self.width * itemsize
        block = -(-one * (_WHOLE + _DIVIDED) // tp) if sequence else one * _WHOLE + -(-one * _DIVIDED // tp)
        if not recomputes:
            return self.depth * block
        return self.depth * (-(-one // tp) if sequence else one) + min(1, self.depth) * block

    def bytes_sent(self, num_tokens: int, itemsize: int, *, tp: int = 1, recomputes: bool = False) -> int:
        """Bytes that a rank sends to its tensor ranks in a micro-batch.

        A sum sends 2 (tp - 1) / tp of its bytes, as a reduce-scatter and an all-gather in its place do.
        """
        num = self.depth * (_EXCHANGES + recomputes)  # it ends before the last sum of a block
        return num * 2 * (num_tokens * self.width * itemsize) * (tp - 1) // tp
