"""Models of transformers are divided by their own plans or ours, and train to the values of one process."""

import pytest
import torch

from tests.parallel.models import MODELS, kind_of
from tests.parallel.runs import compare, divided, plain


def adamw(parameters):
    # Biases of keys have gradients near 0, of rounding in the float32 loss. With 1e-8 each is a whole step.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


FAST = {("Llama", 2, 2), ("Qwen3", 2, 2), ("T5", 2, 2), ("Mixtral", 2, 2), ("GPT-2", 4, 2)}
MORE_RANKS = ("Llama, tied", "Gemma", "T5")
"""Models that are divided over 4 tensor ranks as well, some of which share heads of keys then."""
NAMES = [name for name in MODELS if name not in ("Qwen3, tied", "Gemma 2")]  # which test_loss.py trains
CASES = [
    *((name, 2, 2, 3) for name in NAMES),
    *((name, 4, 2, stage) for name, stage in (("GPT-2", 3), ("Mixtral", 1))),
    *((name, 4, 4, 3) for name in MORE_RANKS),
]


@pytest.mark.parametrize(
    ("name", "num_ranks", "tp", "stage"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case[:3] not in FAST)) for case in CASES],
)
def test_a_model_trains_as_in_one_process(ranks, name, num_ranks, tp, stage):
    config = {"stage": stage, "mesh": {"tp": tp}, "clip_grad_norm": 0.5}
    # The loss of balance is of each rank's batch.
    want = plain(adamw, kind=kind_of(name), max_norm=0.5, num_parts=num_ranks // tp)
    found = ranks(num_ranks, divided, config, adamw, kind=kind_of(name))
    # The loss of transformers is in float32, and Adam divides small gradients by their own size.
    compare(found, want, losses=1e-6, norms=1e-5, values=3e-5)
