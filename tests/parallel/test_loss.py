"""Losses over divided logits: those of one process, and nobody holds all logits."""

import copy
import functools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

from tests.distributed.training import seeded
from tests.parallel.models import GROUPED, VOCABULARY, build
from tests.parallel.runs import Kind, compare, divided, initialize, plain
from tests.ranks import on_ranks
from zeroshard.comm.collectives import Axis
from zeroshard.parallel.tensor.losses import Classes, cross_entropy, embed
from zeroshard.parallel.tensor.sequence import Activations
from zeroshard.plan.layout import Span

BATCH, LENGTH = 4, 12
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
"""The loss of transformers is computed in float32."""


def sharded(model, config, plan=None):
    return initialize(model, sgd, config, plan)


sgd = functools.partial(torch.optim.SGD, lr=0.1)


def batches():
    """Inputs of a model: plain ones, rows that do not count, a number of items, labels that are shifted."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    masked = tokens.clone()
    masked[:, :4] = -100
    masked[0] = -100
    shifted = tokens.roll(-1, 1)
    return [
        {"input_ids": tokens, "labels": tokens},
        {"input_ids": tokens, "labels": masked},
        {"input_ids": tokens, "labels": tokens, "num_items_in_batch": 17},
        {"input_ids": tokens, "labels": masked, "num_items_in_batch": torch.tensor(23)},
        {"input_ids": tokens, "labels": tokens, "shift_labels": shifted},
    ]


def loss_of(model, number, own=slice(None)):
    return model(**batches()[number]).loss  # there are no data-parallel ranks


@pytest.mark.long_where(name=["Llama", "Gemma 2"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3, tied", "Gemma 2"])
def test_a_model_of_transformers_trains_as_in_one_process(ranks, name):
    kind = Kind(functools.partial(build, name), loss_of, None, BATCH)
    found = ranks(2, divided, {"stage": 1, "mesh": {"tp": 2}}, sgd, kind=kind, steps=len(batches()))
    compare(found, plain(sgd, kind=kind, steps=len(batches())), losses=1e-6, norms=1e-5, values=1e-6)


@pytest.mark.parametrize("tiles", ["none", 2])
def test_a_divided_head_computes_in_its_dtype(ranks, tiles):
    kind = Kind(functools.partial(build, "Llama"), loss_of, None, BATCH)
    precision = {"param_dtype": "fp32", "overrides": {"lm_head": "bf16"}}
    config = {"stage": 1, "precision": precision, "loss": {"tiles": tiles}}
    [want] = ranks(1, divided, config, sgd, kind=kind)
    for run in ranks(2, divided, config | {"mesh": {"tp": 2}}, sgd, kind=kind):
        assert run.losses == pytest.approx(want.losses, rel=1e-3)  # of bfloat16 logits


@on_ranks(2)
def test_logits_are_gathered_unless_a_loss_is_computed_in_training():
    whole, found = build("Llama"), []
    engine = sharded(build("Llama"), {"stage": 1, "mesh": {"tp": 2}})
    inputs = batches()[1]
    without = {"input_ids": inputs["input_ids"]}
    for is_training, given in ((False, inputs), (False, without), (True, without)):
        engine.train(is_training)
        found.append((engine(**given).logits, whole(**given).logits))
    engine.eval()
    found.append((engine(**inputs).loss, whole(**inputs).loss))
    engine.train()
    divided, want = engine(**inputs).logits, whole(**inputs).logits
    assert repr(divided) == f"DividedLogits({[BATCH, LENGTH, VOCABULARY // 2]} of {VOCABULARY} classes)"
    found.append((divided.gather(), want))
    for use in (lambda: torch.argmax(divided), lambda: divided[0], lambda: torch.add(want, divided)):
        with pytest.raises(TypeError, match=r"call outputs\.logits\.gather\(\) on all of them"):
            use()
    with pytest.raises(AttributeError, match=r"no attribute 'argmax': the logits .* are divided"):
        divided.argmax(-1)
    loss, by_place, *_ = engine(**inputs, return_dict=False)
    found += [(loss, whole(**inputs).loss), (by_place.gather(), want)]
    model = engine.module
    engine.close()
    assert model.loss_function.__name__ == "ForCausalLMLoss"
    for got, expected in found:
        torch.testing.assert_close(got, expected, **CLOSE)


class Another(transformers.LlamaForCausalLM):
    def forward(self, input_ids, labels=None):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        return {"loss": F.cross_entropy(self.lm_head(hidden).flatten(0, 1), labels.flatten())}


class Seldom(Another):
    def forward(self, input_ids, labels=None):
        return self.loss_function(None, labels, 0) if labels is None else super().forward(input_ids, labels)


@on_ranks(2)
def test_a_loss_of_the_model_is_over_all_logits_or_an_error():
    torch.manual_seed(0)
    tokens, config = torch.arange(8).view(2, 4), {"stage": 1, "mesh": {"tp": 2}}
    want = Another(transformers.LlamaConfig(**GROUPED)).train()
    torch.manual_seed(0)
    engine = sharded(Another(transformers.LlamaConfig(**GROUPED)).train(), config)
    torch.testing.assert_close(engine(tokens, labels=tokens)["loss"], want(tokens, tokens)["loss"])
    engine.close(restore=False)
    engine = sharded(Seldom(transformers.LlamaConfig(**GROUPED)).train(), config)
    with pytest.raises(RuntimeError, match="Seldom did not call its loss_function for labels in training"):
        engine(tokens, labels=tokens)


def largest_exchange(plan_of_head):
    """The most bytes of an exchange of a training step in which logits are most of what is computed."""
    sizes = []

    def noted(label, line, kind, num_bytes):
        sizes.append(num_bytes)
        return label

    model = build("Llama", vocab_size=64 * VOCABULARY)
    plan = None if plan_of_head is None else dict(model.tp_plan) | {"lm_head": plan_of_head}
    engine = sharded(model.train(), {"stage": 1, "mesh": {"tp": 2}}, plan)
    with mock.patch.object(engine._axes.tp, "note", noted):
        engine.backward(engine(**batches()[0]).loss)
    return max(sizes)


@on_ranks(2)
def test_no_exchange_is_as_large_as_the_logits():
    part = BATCH * LENGTH * 64 * VOCABULARY // 2 * 8
    assert largest_exchange("colwise_gather_output") >= part
    assert largest_exchange(None) < part / 50


# -------------------------------------------------------------------------------- losses in a user's loop


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 16), nn.Linear(16, 6), nn.Linear(6, 12)

    def forward(self, x):
        return self.head(self.down(self.up(x).tanh()))


KINDS = [
    {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
    for reduction in ("mean", "sum", "none")
    for smoothing in (0.0, 0.3, 1.0)
    for ignored in (-100, 3)
]


@pytest.mark.long_where(dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks()
def test_a_loop_of_the_user_computes_its_loss_over_parts(num_ranks, dtype):
    # In bfloat16, sums over parts are rounded elsewhere: 3 digits.
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 3e-2, "atol": 6e-2}
    whole = seeded(Classifier).to(dtype)
    model = copy.deepcopy(whole)
    plan = {"up": "colwise", "down": "rowwise", "head": "colwise"} if num_ranks > 1 else None
    engine = sharded(model, {"stage": 1, "mesh": {"tp": num_ranks}}, plan)
    x, targets = torch.randn(4, 5, 6, dtype=dtype), torch.arange(20).view(4, 5) * 5 % 12
    wide = torch.promote_types(dtype, torch.float32)
    for kind in KINDS:
        of_targets = targets.masked_fill(targets % 2 == 0, kind["ignore_index"])
        want = F.cross_entropy(whole(x).flatten(0, 1).to(wide), of_targets.flatten(), **kind)
        got = cross_entropy(engine(x), of_targets, engine.module.head, **kind)
        assert got.shape == (() if got.dim() == 0 else targets.shape)
        assert got.dtype == wide
        whole.zero_grad()
        want.sum().backward()
        engine.backward(got.sum())
        torch.testing.assert_close(got.flatten(), want.flatten(), **close)
        part = whole.up.bias.grad.chunk(num_ranks)[dist.get_rank()]
        torch.testing.assert_close(engine.module.up.bias.grad.to(part.dtype), part, **close)
        engine.zero_grad()
    for wrong in (12, -1):
        with pytest.raises(IndexError, match=str(wrong)):
            cross_entropy(engine(x), targets.masked_fill(targets == 0, wrong), engine.module.head)


@on_ranks(2)
def test_wrong_arguments_are_named():
    plan = {"up": "colwise", "down": "rowwise", "head": "colwise_gather_output"}
    engine = sharded(Classifier(), {"stage": 1, "mesh": {"tp": 2}}, plan | {"head": "colwise"})
    head, logits, targets = engine.module.head, torch.zeros(4, 12), torch.zeros(4, dtype=torch.long)
    text = "logits: expected 6 classes, this rank's part of 12 of 'head', got 12"
    with pytest.raises(ValueError, match=re.escape(text)):
        cross_entropy(logits, targets, head)
    with pytest.raises(
        ValueError, match=re.escape("targets: expected integers of shape [4], got torch.float32")
    ):
        cross_entropy(logits, targets.float(), head)
    with pytest.raises(ValueError, match=re.escape("got torch.int64 of shape [2, 2]")):
        cross_entropy(logits, targets.view(2, 2), head)
    with pytest.raises(ValueError, match=r"label_smoothing: expected a number in \[0, 1\], got 1.5"):
        cross_entropy(logits[:, :6], targets, head, label_smoothing=1.5)
    engine.close(restore=False)
    with pytest.raises(ValueError, match="'colwise_loss': expected the head of a causal language model"):
        sharded(Classifier(), {"stage": 1, "mesh": {"tp": 2}}, plan | {"head": "colwise_loss"})


@on_ranks(2)
def test_rows_without_tokens_on_a_rank_and_unknown_tokens():
    axis = Axis(dist.group.WORLD, device=torch.device("cpu"), timeout_s=20.0)
    over, rank = Activations(axis, tag=1), dist.get_rank()
    logits = 30 * torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    logits[1:3, :4] = -torch.inf  # the first rank has no token for these rows
    own, targets = Span(4 * rank, 4 * rank + 4), torch.tensor([1, 5, 6, 7, 0])
    part = logits[:, own.slice].clone().requires_grad_()
    whole = logits.clone().requires_grad_()
    head = nn.Module()
    head._classes_of_rank = Classes(own, over, "head")
    loss, want = cross_entropy(part, targets, head), F.cross_entropy(whole, targets)
    assert sum(axis.ledger.counter.calls.values()) == 1
    loss.backward()
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(part.grad, whole.grad[:, own.slice])
    nothing = torch.full_like(targets, -100)  # where no row counts, as in torch
    assert cross_entropy(part, nothing, head).isnan()
    assert cross_entropy(part, nothing, head, reduction="sum") == 0
    with pytest.raises(ValueError, match="reduction: expected 'mean', 'sum' or 'none', got 'max'"):
        cross_entropy(part, targets, head, reduction="max")
    table = torch.ones(4, 3)
    for token in (8, -1):
        with pytest.raises(IndexError, match=f"'tokens': expected tokens in .*, got {token}"):
            embed(torch.tensor([1, token]), lambda at: table[at], own, over, "tokens")
