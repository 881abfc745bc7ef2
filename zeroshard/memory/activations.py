"""Bytes of activations in a decoder-only transformer, and those that tensor ranks send for them.

The backward of a block needs so many tensors of tokens x width elements, in the compute dtype:

    whole on each rank    5    the inputs of both norms and of both divided pairs, and dropout masks
    divided over tp      12    queries, keys, values and attention (4), and twice 4 x width after it

In 16 bits that is s b h (10 + 24 / tp) bytes. Fused kernels compute attention scores again in the backward,
as selective recomputation does. If parts of the sequence lie on the tensor ranks, the first row is divided,
too. With recomputation of each block only its input is kept, and one block is there whole. After the blocks
come the inputs of the last norm and of the head, and the logits in float32.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equations 1
to 6, and section 4.3 for the embedding and the head.

The sizes of a typical model with a given number of parameters, as integers.

The rule is a decoder-only transformer in the manner of Llama 3:

    blocks        12 * depth * width**2 parameters: Kaplan et al. 2020, "Scaling Laws for Neural Language
                  Models", section 2.1
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
    is_tied: bool
    """True if the head is the embedding; otherwise the head is as large again."""

    @property
    def vocabulary(self) -> int:
        """Logits of a token; 0 for a model that is one unit."""
        return self.embedding // self.width if self.width else 0

    @property
    def blocks(self) -> list[int]:
        """Parameters of each block. The sizes differ by 1 at most."""
        total = self.num_params - self.embedding * (1 if self.is_tied else 2)
        return [total // self.depth + (number < total % self.depth) for number in range(self.depth)]

    def bytes_of_input(self, batch: MicroBatch) -> int:
        """Bytes of the input of a block on one rank."""
        one = batch.num_tokens * self.width * batch.itemsize
        return -(-one // batch.tp) if batch.sequence else one

    def bytes_of_block(self, batch: MicroBatch) -> int:
        """Bytes that the backward of a block needs on one rank."""
        one = batch.num_tokens * self.width * batch.itemsize
        divided = one * _DIVIDED
        if batch.sequence:
            return -(-(one * _WHOLE + divided) // batch.tp)
        return one * _WHOLE + -(-divided // batch.tp)

    def bytes_kept(self, batch: MicroBatch) -> int:
        """Bytes that a block keeps from its forward to its backward: its input alone if it is recomputed."""
        return self.bytes_of_input(batch) if batch.recomputes else self.bytes_of_block(batch)

    def bytes_of_head(self, batch: MicroBatch) -> int:
        """Bytes of the inputs of the last norm and of the head, and of the logits."""
        logits = -(-_LOGIT * batch.num_tokens * self.vocabulary // batch.tp)
        return 2 * self.bytes_of_input(batch) + logits if self.vocabulary else 0

    def bytes_held(self, batch: MicroBatch) -> int:
        """Bytes of activations of a rank with all blocks, at most, for one micro-batch."""
        again = self.bytes_of_block(batch) if batch.recomputes and self.depth else 0
        return self.depth * self.bytes_kept(batch) + max(again, self.bytes_of_head(batch))

    def bytes_sent(self, batch: MicroBatch) -> int:
        """Bytes that a rank sends to its tensor ranks in a micro-batch, for all blocks.

        A sum sends 2 (tp - 1) / tp of its bytes, as a reduce-scatter and an all-gather in its place do.
        """
        # A recomputation ends before the last sum of a block.
        num = self.depth * (_EXCHANGES + batch.recomputes)
        return num * 2 * (batch.num_tokens * self.width * batch.itemsize) * (batch.tp - 1) // batch.tp


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


_WHOLE, _DIVIDED = 5, 12
_EXCHANGES = 4
"""Sums over the tensor ranks for each block: 2 in the forward, 2 in the backward."""
_LOGIT = 4
"""Bytes of a logit: the loss is computed in float32."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a micro-batch of a rank.

    Raises:
        ValueError: no whole number of samples.
    """

    num: int
    """Samples x length."""
    length: int = 0
    """Tokens of a sample; 0: all of them are one sample."""

    def __post_init__(self) -> None:
        if type(self.num) is not int or self.num < 0:
            raise ValueError(f"num_tokens: expected an integer >= 0, got {self.num!r}")
        if type(self.length) is not int or self.length < 0 or (self.length and self.num % self.length):
            raise ValueError(f"length: expected a divisor of the {self.num} tokens, got {self.length!r}")
        if not self.length:
            object.__setattr__(self, "length", self.num)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A micro-batch of a rank, and the way in which blocks compute it."""

    num_tokens: int
    """Samples x sequence length."""
    itemsize: int
    """Bytes of an element in the compute dtype."""
    tp: int = 1
    """Tensor ranks."""
    sequence: bool = False
    """True if the values between divided pairs are divided along the sequence."""
    recomputes: bool = False
    """True if only the inputs of blocks are kept."""
