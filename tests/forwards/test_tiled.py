"""Losses in tiles: those of all logits at once, which are never there."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.forwards.peak import Peak
from tests.parallel.models import build, kind_of, tokens_of
from tests.parallel.runs import compare, divided, plain
from zeroshard.config.sections import ROW_BYTES

ROWS, WIDTH, CLASSES = 21, 8, 13
REMEDY = r"zeroshard\.tiled_cross_entropy in "


sgd = functools.partial(torch.optim.SGD, lr=0.1)


def inputs(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)
    hidden = torch.randn(3, ROWS // 3, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(CLASSES, (3, ROWS // 3))
    targets[0, :3] = -100
    return head, hidden, targets


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, [one for one in tensors if one is not None])


@pytest.mark.parametrize("tiles", ["auto", 1, 4, ROWS, 1000])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"label_smoothing": 0.2}, {"z_loss": 1e-2, "label_smoothing": 0.1}],
    ids=str,
)
def test_loss_and_gradients_are_those_of_all_logits(options, tiles):
    head, hidden, targets = inputs(bias="z_loss" not in options)
    own = zeroshard.tiled_cross_entropy(hidden, targets, head, tiles=tiles, **options)
    logits = head(hidden)
    z_loss, given = options.get("z_loss", 0.0), {k: v for k, v in options.items() if k != "z_loss"}
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **given)
    square = logits.logsumexp(-1).square()[targets != -100]
    want = want + z_loss * (square.sum() if options.get("reduction") == "sum" else square.mean())
    torch.testing.assert_close(own, want, rtol=1e-12, atol=1e-12)
    leaves = (hidden, head.weight, head.bias)
    for got, expected in zip(gradients(own * 3, *leaves), gradients(want * 3, *leaves), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_what_does_not_count_and_what_needs_no_gradient(ignore_index):
    head, hidden, targets = inputs(torch.float32)
    targets = targets.masked_fill(targets == -100, ignore_index)
    options = {"ignore_index": ignore_index, "tiles": 4}
    want = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), ignore_index=ignore_index)
    with torch.no_grad():
        close = {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(
            zeroshard.tiled_cross_entropy(hidden, targets, head, **options), want, **close
        )
    head.requires_grad_(False)
    own = zeroshard.tiled_cross_entropy(hidden, targets, head, **options)
    torch.testing.assert_close(*gradients(own, hidden), *gradients(want, hidden), **close)
    assert zeroshard.tiled_cross_entropy(
        hidden, torch.full_like(targets, ignore_index), head, **options
    ).isnan()
    assert zeroshard.tiled_cross_entropy(hidden, torch.full_like(targets, CLASSES), head, tiles=4).isnan()


def test_in_bfloat16_and_under_autocast_the_gradient_of_the_weight_is_added_up_in_float32():
    head, hidden, targets = inputs(torch.bfloat16)
    wide, wide_hidden, _ = inputs(torch.float32)
    with torch.no_grad():
        for one, other in ((wide.weight, head.weight), (wide.bias, head.bias), (wide_hidden, hidden)):
            one.copy_(other)
    want = F.cross_entropy(wide(wide_hidden).flatten(0, 1), targets.flatten())
    expected_gradients = gradients(want, wide_hidden, wide.weight)
    own = zeroshard.tiled_cross_entropy(hidden, targets, head, tiles=ROWS)
    with torch.autocast("cpu", torch.bfloat16):
        cast = zeroshard.tiled_cross_entropy(wide_hidden, targets, wide, tiles=ROWS)
    for loss, leaves in ((own, (hidden, head.weight)), (cast, (wide_hidden, wide.weight))):
        assert loss.dtype is torch.float32
        torch.testing.assert_close(loss, want, rtol=0.01, atol=0)  # logits of bfloat16
        for got, expected in zip(gradients(loss, *leaves), expected_gradients, strict=True):
            assert (got.float() - expected).norm() < 0.01 * expected.norm()


def test_the_logits_of_a_tile_are_all_that_is_there():
    num, width, classes, tiles = 512, 16, 2048, 16
    head, hidden = nn.Linear(width, classes, bias=False), torch.randn(num, width, requires_grad=True)
    targets = torch.zeros(num, dtype=torch.long)
    with Peak([head.weight, hidden, targets]) as live:
        zeroshard.tiled_cross_entropy(hidden, targets, head, tiles=tiles).backward()
    tile, gradients = num // tiles * classes * ROW_BYTES, hidden.nbytes + 2 * head.weight.nbytes
    # A summand of the weight's gradient, or what the backward gives; and a few numbers of each row.
    assert tile < live.peak < 1.02 * (tile + gradients) + 40 * num < num * classes * 4


def even(name):
    """A model and batches whose length two ranks divide."""
    return kind_of(name)._replace(loss_of=loss_of_even)


def loss_of_even(model, number, own=slice(None)):
    tokens = tokens_of(number)[own, :8]
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.long_where(name=["GPT-2", "Llama"])
@pytest.mark.parametrize(
    ("num_ranks", "config", "name"),
    [
        (1, {"stage": 0}, "Llama"),
        (2, {"stage": 3, "gradient_accumulation_steps": 2}, "Llama, tied"),
        (2, {"stage": 3, "recompute": "unit"}, "GPT-2"),
        (2, {"stage": 1, "mesh": {"tp": 2}}, "Qwen3, tied"),
        (2, {"stage": 0, "mesh": {"tp": 2, "sequence": True}}, "Llama"),
    ],
    ids=str,
)
def test_a_model_of_transformers_trains_as_in_one_process(ranks, num_ranks, config, name):
    found = ranks(num_ranks, divided, {**config, "loss": {"tiles": 5}}, sgd, kind=even(name), steps=3)
    compare(found, plain(sgd, kind=even(name), steps=3), losses=1e-6, norms=1e-5, values=1e-6)


def pipelined():
    config = {"stage": 0, "mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}, "loss": {"tiles": 3}}
    engine = zeroshard.initialize(build("Llama"), sgd, config).engine
    tokens = torch.arange(1, 25).view(4, 6) % 20
    losses = [engine.train_batch({"input_ids": tokens}, tokens).item() for _ in range(3)]
    engine.close(restore=False)
    model = build("Llama")
    optimizer = sgd(model.parameters())
    for loss in losses:
        want = model(input_ids=tokens, labels=tokens).loss
        want.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(want.item(), rel=1e-6)


def test_over_pipeline_ranks(ranks):
    ranks(2, pipelined)


def test_logits_are_there_without_labels_and_in_evaluation_alone():
    engine = zeroshard.initialize(build("Llama"), sgd, {"loss": {"tiles": "auto"}}).engine
    whole, tokens = build("Llama"), torch.arange(12).view(2, 6)
    output = engine(input_ids=tokens, labels=tokens)
    assert output.logits is None
    torch.testing.assert_close(engine(input_ids=tokens).logits, whole(input_ids=tokens).logits)
    engine.eval()
    torch.testing.assert_close(engine(input_ids=tokens, labels=tokens).logits, whole(input_ids=tokens).logits)
    engine.close(restore=False)


def adapted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(build("Llama"), peft.LoraConfig(target_modules=["lm_head"]))


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (functools.partial(build, "T5"), {}),
        (adapted, {}),
        (functools.partial(build, "Llama"), {"units": ["LlamaDecoderLayer", "Linear"]}),
        (lambda: nn.Sequential(nn.Linear(2, 2)), {}),
    ],
    ids=["its own loss", "an adapter", "a unit", "no language model"],
)
def test_other_models_are_refused(make, config):
    with pytest.raises(ValueError, match=REMEDY):
        zeroshard.initialize(make(), sgd, {"loss": {"tiles": 2}, **config})


def test_estimates_leave_the_logits_out():
    tokens, vocabulary = 9 * 1000, build("Llama").config.vocab_size
    one, tiled = (
        zeroshard.estimate(build("Llama"), 1, {"loss": {"tiles": tiles}}, num_tokens=tokens).activations
        for tiles in ("none", 8)
    )
    logits = tokens * vocabulary * 4  # in float32, for the backward
    assert one - tiled == pytest.approx(logits, rel=0.1)
    number = zeroshard.estimate(7e9, 8, {"stage": 3, "loss": {"tiles": "auto"}}, num_tokens=2**17)
    whole = zeroshard.estimate(7e9, 8, {"stage": 3}, num_tokens=2**17)
    assert whole.activations - number.activations > 2**17 * 128_256 * 4 - 3 * 2**30


def test_second_derivatives_are_refused():
    head, hidden, targets = inputs()
    loss = zeroshard.tiled_cross_entropy(hidden, targets, head)
    with pytest.raises(RuntimeError, match="a loss in tiles has no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_patched_head_and_logits_that_a_hook_or_the_model_changes_are_refused():
    model = build("Llama")
    model.lm_head.forward = lambda x: x
    with pytest.raises(ValueError, match=REMEDY):
        zeroshard.initialize(model, sgd, {"loss": {"tiles": 2}})
    hooked, tokens = build("Llama"), torch.arange(12).view(2, 6)
    hooked.lm_head.register_forward_hook(lambda module, args, output: output.clamp_(-0.1, 0.1))
    for model in (hooked, build("Gemma 2")):  # which bounds its logits
        engine = zeroshard.initialize(model, sgd, {"loss": {"tiles": 2}}).engine
        with pytest.raises(ValueError, match="changes its logits between its head and its loss"):
            engine(input_ids=tokens, labels=tokens)
        engine.close(restore=False)


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 9)

    def forward(self, x, targets):
        return zeroshard.tiled_cross_entropy(self.body(x), targets, self.head)


def test_a_head_that_is_a_unit_of_its_own_is_refused():
    engine = zeroshard.initialize(WithHead(), sgd, {"stage": 3, "units": ["Linear"]}).engine
    with pytest.raises(ValueError, match="no unit of its own: name the class of the blocks in units="):
        engine(torch.ones(3, 4), torch.arange(3))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"targets": torch.zeros(3, 7)}, "expected integers of shape"),
        ({"reduction": "none"}, "reduction: expected 'mean' or 'sum', got 'none'"),
        ({"label_smoothing": 2}, r"label_smoothing: expected a number in \[0, 1\], got 2"),
        ({"head": nn.Sequential()}, "head: expected an nn.Linear .* in units=; got Sequential"),
    ],
)
def test_mistakes(changes, error):
    head, hidden, targets = inputs()
    with pytest.raises(ValueError, match=error):
        zeroshard.tiled_cross_entropy(**{"hidden": hidden, "targets": targets, "head": head, **changes})
