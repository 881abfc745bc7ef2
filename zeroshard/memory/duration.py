"""The time of a training from its floating-point operations.

A token takes 2 operations for each parameter in the forward, 4 in the backward, and 2 more where activations
are recomputed. With them the time is 8 T P / (n X) for T tokens, P parameters and n ranks that each reach X
operations per second. Attention scores and the head are left out.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", equation 4: 1024 GPUs train 175e9 parameters on 300e9 tokens in 34 days.
"""

from __future__ import annotations

_FORWARD, _BACKWARD = 2, 4


def training_seconds(
    num_params: float,
    num_tokens: float,
    num_ranks: int,
    flops_per_second: float,
    *,
    recomputes: bool = True,
) -> float:
    """Return the seconds of a training.

    Args:
        num_params: the parameters that a token uses.
        num_tokens: the tokens of the whole training.
        num_ranks: the ranks.
        flops_per_second: floating-point operations per second that a rank reaches in training, not its peak.
        recomputes: True if backward recomputes the activations.

    Raises:
        ValueError: a number that is not positive.
    """
    given = {"num_params": num_params, "num_tokens": num_tokens, "num_ranks": num_ranks}
    for name, number in (given | {"flops_per_second": flops_per_second}).items():
        if not 0 < number < float("inf"):
            raise ValueError(f"{name}: expected a number above 0, got {number!r}")
    per_token = (_FORWARD * (1 + recomputes) + _BACKWARD) * num_params
    return per_token * num_tokens / (num_ranks * flops_per_second)
