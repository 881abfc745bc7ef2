"""Modules that compute in another dtype than the rest, over tensor and pipeline ranks."""

import pytest
import torch
from torch import nn

from tests.parallel import runs, sequences
from tests.parallel.runs import adamw

OVERRIDES = {"*norm*": "bf16", "second": "bf16", "blocks.1.up": "fp32", "blocks.*.down": "fp32"}
"""A bfloat16 norm in a float64 model: a cast that is missing shows in 3 digits."""
NORMS = ("norm", *(f"blocks.{n}.{at}" for n in (0, 1) for at in ("norm", "second")))
WIDE = ("blocks.1.up", "blocks.0.down", "blocks.1.down")


class Wrapped(nn.Module):
    """A module whose parameters stay in float64, and which computes with casts of them."""

    def __init__(self, inside, dtype):
        super().__init__()
        self.inside, self.dtype = inside, dtype

    def forward(self, x):
        given = {name: parameter.to(self.dtype) for name, parameter in self.inside.named_parameters()}
        return torch.func.functional_call(self.inside, given, x.to(self.dtype)).to(x.dtype)


def wrap(model):
    """The same by hand."""
    for name in (*NORMS, *WIDE):
        parent, _, attribute = name.rpartition(".")
        dtype = torch.bfloat16 if name in NORMS else torch.float32
        setattr(model.get_submodule(parent), attribute, Wrapped(model.get_submodule(name), dtype))


def test_divided_layers_and_norms_beside_them_compute_in_their_dtype(ranks):
    want = runs.plain(adamw, wrap)
    config = {"stage": 3, "mesh": {"tp": 2}, "precision": {"overrides": OVERRIDES}}
    found = ranks(2, runs.divided, config, adamw)
    runs.check_same(found)
    for run in found:
        # Sums of gradients over the ranks are rounded to bfloat16 on their way through a norm.
        assert run.losses[:2] == pytest.approx(want.losses[:2], rel=1e-6)
        assert run.losses == pytest.approx(want.losses, rel=2e-4)
        assert run.norms == pytest.approx(want.norms, rel=2e-3)


def on_parts(config, plan):
    """Losses over parts of the sequence, and the bytes that a step moves between the tensor ranks."""
    engine = sequences.sharded(sequences.build(sequences.Model), config, plan)
    losses, moved = [], []
    for number in range(3):
        engine.reset_comm_report()
        loss = sequences.loss_of(engine, number)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        moved.append(sum(engine.comm_report().bytes_sent.values()))
    return losses, moved


def test_norms_on_parts_of_a_sequence_cast_and_gather_what_goes_on(ranks):
    config = {"stage": 3, "mesh": {"tp": 2}}
    names = ("norm", "second", "after")
    ((want, sent), _) = ranks(2, on_parts, config, sequences.PLAN)
    precision = {"overrides": dict.fromkeys(names, "fp32")}
    for losses, moved in ranks(2, on_parts, config | {"precision": precision}, sequences.PLAN):
        assert losses == pytest.approx(want, rel=1e-5)
        assert losses != want
        assert moved[1] <= sent[1]  # what is gathered lies in the dtype of the layers around
