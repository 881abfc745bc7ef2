"""The sizes of a typical model with a given number of parameters, as integers.

The rule is a decoder-only transformer in the manner of Llama 3:

    blocks        12 * depth * width**2 parameters: Kaplan et al. 2020, "Scaling Laws for Neural Language
                  Models", section 2.1
    heads         of 128 elements: the same table of Llama 3
    width         128 * depth: Llama 3 has 32 x 4096 at 8 B and 126 x 16384 at 405 B; GPT-3 has 96 x 12288.
                  Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3; Brown et al. 2020, table 2.1
    embedding     128256 * width parameters, the vocabulary of Llama 3, but at most a half of all
    head          as large as the embedding; the same tensor below 4 B, as in Llama 3.2 of 1 B and 3 B

`tests/test_estimate.py` compares it with Llama 3 and 3.2 of 1 B to 70 B: the gathered parameters at the peak
are within an eighth. A model with a smaller vocabulary gathers less: Llama 2 of 7 B, with 32000, about half.
"""

from __future__ import annotations

from dataclasses import dataclass

WIDTH_PER_BLOCK = 128
SIZE_OF_HEAD = 128
VOCABULARY = 128_256
TIED_BELOW = 4 * 10**9
SMALLEST = 1 << 20
"""Fewer parameters are taken as one unit."""
LARGEST = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The parameters of each part of a model; all parts together have the number that was asked for."""

    num_params: int
    depth: int
    """The number of blocks; 0 for a model that is one unit."""
    width: int
    embedding: int
    """Parameters of the embedding."""
    is_tied: bool
    """True if the head is the embedding; otherwise the head is as large again."""

    @property
    def num_heads(self) -> int:
        """The heads of attention, of 128 elements each as in Llama 3."""
        return self.width // SIZE_OF_HEAD

    @property
    def blocks(self) -> list[int]:
        """Parameters of each block. The sizes differ by 1 at most."""
        total = self.num_params - self.embedding * (1 if self.is_tied else 2)
        return [total // self.depth + (number < total % self.depth) for number in range(self.depth)]


def typical_sizes(num_params: int) -> Sizes:
    """Return the sizes of a typical model with exactly this number of parameters.

    Raises:
        ValueError: there are more parameters than any depth of this rule makes sense for.
    """
    if num_params > LARGEST:
        raise ValueError(f"expected at most {LARGEST:,} parameters, got {num_params:,}")
    if num_params < SMALLEST:
        return Sizes(num_params=num_params, depth=0, width=0, embedding=0, is_tied=True)
    is_tied = num_params < TIED_BELOW
    num_tables = 1 if is_tied else 2
    depth = 1
    while abs(_count(depth + 1, num_tables) - num_params) < abs(_count(depth, num_tables) - num_params):
        depth += 1
    width = WIDTH_PER_BLOCK * depth
    embedding = min(VOCABULARY * width, num_params // 2)
    return Sizes(num_params=num_params, depth=depth, width=width, embedding=embedding, is_tied=is_tied)


def _count(depth: int, num_tables: int) -> int:
    """Return the parameters of the rule at a depth."""
    width = WIDTH_PER_BLOCK * depth
    return 12 * depth * width**2 + num_tables * VOCABULARY * width
