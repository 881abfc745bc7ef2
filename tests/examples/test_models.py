"""Switch experts and sparse attention of the examples: oracles of papers, and training at every stage."""

import copy
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import flex_attention
from transformers import AttentionInterface

import zeroshard
from tests.distributed.training import ALL_STAGES, build
from tests.ranks import on_ranks

LENGTH = 24
ON_RANKS = on_ranks(pytest.param(1, marks=pytest.mark.long), 2)


def example():
    import switch

    return switch


def test_capacity_is_that_of_the_paper_and_the_tokens_beyond_it_are_dropped_in_their_order():
    for tokens, experts, factor, most in ((16, 4, 1.0, 4), (10, 4, 1.25, 4), (3, 8, 1.0, 1)):
        assert example().capacity(tokens, experts, factor) == most == math.ceil(tokens / experts * factor)
    chosen = torch.tensor([0, 1, 0, 0, 2, 1, 0, 1, 1])
    kept = example().within_capacity(chosen, 4, 2)
    assert kept.tolist() == [True, True, True, False, True, True, False, False, False]


def test_the_balance_of_even_routing_is_one_and_of_one_expert_their_number():
    balance = example().balance
    even = 20.0 * torch.eye(4).repeat(3, 1)
    assert balance(even).item() == pytest.approx(1.0, abs=1e-6)
    assert balance(torch.tensor([[50.0, 0, 0, 0]]).repeat(5, 1)).item() == pytest.approx(4.0, abs=1e-6)
    logits = torch.randn(9, 4, dtype=torch.float64)
    shares = torch.stack([(logits.argmax(1) == e).double().mean() for e in range(4)])
    want = 4 * (shares * logits.softmax(1).mean(0)).sum().item()
    assert balance(logits).item() == pytest.approx(want, abs=1e-6)


def test_a_block_is_each_tokens_expert_times_its_probability_and_zero_where_it_is_full():
    """Against a loop over tokens, with a capacity that some tokens exceed."""
    model = example().build("eager", capacity_factor=0.5)
    block = model.model.layers[0].mlp
    hidden = torch.randn(2, 16, 64)
    got = block(hidden).flatten(0, 1)
    tokens, taken = hidden.flatten(0, 1), [0] * 8
    probabilities = (tokens @ block.gate.weight.T).softmax(1)
    want = torch.zeros_like(tokens)
    for number, token in enumerate(tokens):
        value, expert = probabilities[number].max(0)
        if taken[expert] < 2:  # 32 tokens / 8 experts * 0.5
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            want[number] = value * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        taken[expert] += 1
    assert max(taken) > 2
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_the_loss_is_the_cross_entropy_and_a_hundredth_of_the_balance_of_all_layers():
    model, tokens = example().build(), example().batch(0, 0, 64, size=4, length=LENGTH)
    out = model(tokens, labels=tokens)
    likely = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
    balances = [example().balance(logits).item() for logits in out.router_logits]
    assert len(balances) == 2
    assert out.loss.item() == pytest.approx(likely + 0.01 * sum(balances), abs=1e-6)


# ---------------------------------------------------------------------- training, as in plain PyTorch


def trained(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def loss_of(model, step, rank):
    tokens = example().batch(step, rank, 64, size=4, length=LENGTH)
    return model(tokens, labels=tokens).loss


def wrong(model, stage, steps=3):
    """Names of values that differ from those of one process, with the mean of all ranks' losses."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    plain = copy.deepcopy(model)
    optimizer, engine = trained(plain), zeroshard.initialize(model, trained(model), {"stage": stage}).engine
    for step in range(steps):
        losses = [loss_of(plain, step, one) for one in range(num_ranks)]
        (sum(losses) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_of(engine, step, rank)
        assert loss.item() == pytest.approx(losses[rank].item(), abs=1e-5)
        engine.backward(loss)
        engine.step()
    got, want = engine.full_state_dict(), plain.state_dict()
    return [name for name in got if (got[name] - want[name]).abs().max() > 1e-4]


@pytest.mark.long_where(experts=["batched_mm", "eager"])
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
@ON_RANKS
def test_a_switch_trains_as_in_plain_pytorch(experts):
    """All parameters, at all stages: experts that get no token on a rank too."""
    build = example().build
    return [f"stage {stage}: {name}" for stage in ALL_STAGES for name in wrong(build(experts), stage)]


@ON_RANKS
def test_adapters_of_experts_train_as_in_plain_pytorch():
    """LoRA on the stacked experts and on attention."""
    switch, found = example(), []
    for stage in ALL_STAGES:
        model = switch.add_adapters(switch.build(), 2)
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        found += [f"stage {stage}: {name}" for name in wrong(model, stage)]
    return found


def differing(model, plain, mask, **config):
    """What differs from dense attention in one process, with the mean of all ranks' losses."""
    rank, num_ranks, found = dist.get_rank(), dist.get_world_size(), []
    optimizer, engine = trained(plain), zeroshard.initialize(model, trained(model), config).engine
    for step in range(2):
        batches = [example().batch(step, one, 64, size=2, length=mask.shape[-1]) for one in range(num_ranks)]
        losses = [plain(tokens, labels=tokens, attention_mask=mask).loss for tokens in batches]
        (sum(losses) / num_ranks).backward()
        loss = engine(batches[rank], labels=batches[rank]).loss
        engine.backward(loss)
        trios = [("loss", loss, losses[rank])]
        named = dict(plain.named_parameters())
        trios += [(f"gradient of {name}", engine.full_gradient(name), p.grad) for name, p in named.items()]
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        trios += [(name, engine.full_parameter(name), p) for name, p in named.items()]
        found += [f"step {step}: {name}" for name, got, want in trios if not (got - want).abs().max() < 1e-6]
    return found


@pytest.mark.long_where(pattern=["Fixed"])
@pytest.mark.parametrize("pattern", ["Fixed", "BigBird"])
@ON_RANKS
def test_a_model_with_sparse_attention_trains_as_with_dense_attention_and_the_mask(pattern):
    """Losses, gradients and parameters in float64, with grouped heads."""
    pattern = {"Fixed": sparse().Fixed(16, 1, 16), "BigBird": sparse().BigBird(16, random=1)}[pattern]
    mask, found = sparse().dense_mask(pattern, 6, 128, CPU, True), []
    assert mask.sum() < 0.8 * mask.numel() / 2  # of what a causal model sees
    sparse().register("sparse", pattern)
    for stage, recompute in zip(ALL_STAGES, ["none", "unit", "none", "unit"], strict=True):
        plain, model = (build("transformers Llama").double() for _ in range(2))
        model.set_attn_implementation("sparse")
        names = differing(model, plain, mask, stage=stage, recompute=recompute)
        found += [f"stage {stage}: {name}" for name in names]
    return found


# ----------------------------------------------------------------------------------- sparse attention


def sparse():
    import sparse_attention

    return sparse_attention


def num_blocks(mask):
    """The blocks that flex_attention computes, of each head."""
    return (mask.kv_num_blocks + mask.full_kv_num_blocks).sum(-1)[0].tolist()


CPU = torch.device("cpu")


def test_bigbird_has_as_many_blocks_as_published():
    """Of 4,096 tokens, in blocks of 64: 622 of 4,096 blocks, in each head; other heads have other ones."""
    pattern = sparse().BigBird()
    mask = sparse().block_mask(pattern, 2, 4096, CPU, False)
    assert num_blocks(mask) == [622, 622]
    first, second = pattern.blocks(2, 64)
    assert first.sum() == second.sum() == 622
    assert not first.equal(second)
    assert first[1:-1].sum(1).tolist() == [7, *[8] * 60, 7]


def test_fixed_patterns_are_the_sets_of_the_paper():
    """Local: the same stretch of tokens. Summaries: the last ones of each. Both up to the token itself."""
    length, stride, num = 48, 12, 2
    mask = sparse().dense_mask(sparse().Fixed(stride, num, 16), 1, length, CPU, True)[0, 0]
    for i in range(length):
        local = {j for j in range(i + 1) if j // stride == i // stride}
        summaries = {j for j in range(i + 1) if j % stride >= stride - num}
        assert set(mask[i].nonzero().flatten().tolist()) == local | summaries
    # 4,096 tokens, l = 128, c = 8, blocks of 64: the two blocks of a stretch, and the second of each before.
    blocks = sparse().block_mask(sparse().Fixed(128, 8, 64), 1, 4096, CPU, True)
    assert num_blocks(blocks) == [sum((1 + row % 2) + row // 2 for row in range(64))]


def dense(query, key, value, mask):
    """Attention written out; keys and values have half as many heads."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ value


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str)
@pytest.mark.long_where(pattern=["Fixed"], is_causal=[False])
@pytest.mark.long_where(pattern=["BigBird"], is_causal=[True])
@pytest.mark.parametrize("pattern", ["Fixed", "BigBird"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flex_attention_equals_dense_attention_with_the_mask(pattern, is_causal, device):
    """Forward and backward; torch refuses the backward on CPUs, whose operation it has."""
    torch.manual_seed(0)
    pattern = getattr(sparse(), pattern)(block=16)
    dtype, bound = (torch.float64, 1e-6) if device.type == "cpu" else (torch.float32, 1e-5)
    kind = {"device": device, "dtype": dtype, "requires_grad": True}
    inputs = [torch.randn(2, heads, 192, 16, **kind) for heads in (4, 2, 2)]
    mask = sparse().dense_mask(pattern, 4, 192, device, is_causal)
    want = dense(*inputs, mask)
    grad = torch.randn_like(want)
    wanted = torch.autograd.grad(want, inputs, grad)
    outputs = [sparse().attend(pattern, *inputs, None, is_causal)]  # on a CPU with a dense mask
    with mock.patch.object(flex_attention, "_validate_device"):
        blocks = sparse().block_mask(pattern, 4, 192, device, is_causal)
        outputs.append(flex_attention.flex_attention(*inputs, block_mask=blocks, enable_gqa=True))
    detached = [one.detach() for one in inputs]
    outputs.append(sparse().attend(pattern, *detached, None, is_causal))
    for out in outputs:
        torch.testing.assert_close(out, want, atol=bound, rtol=0)
    for out in outputs[:2]:
        for got, one in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
            torch.testing.assert_close(got, one, atol=bound, rtol=0)


def test_a_pattern_that_leaves_out_nothing_is_dense_attention():
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 64, 16) for _ in range(3)]
    out = sparse().attend(sparse().BigBird(block=16, window=9), *inputs, None, True)
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(*inputs, is_causal=True), atol=1e-6, rtol=1e-5
    )


def test_padding_and_caches_are_refused():
    model = sparse().build("bigbird")
    tokens = torch.zeros(1, 32, dtype=torch.long)
    padded, packed = torch.ones(1, 32), torch.arange(32)[None] % 16
    padded[0, 0] = 0
    for options in ({"attention_mask": padded}, {"position_ids": packed}):
        with pytest.raises(ValueError, match="without padding"):
            model(tokens, **options)
    model(tokens, attention_mask=torch.ones(1, 32))


@pytest.mark.parametrize("options", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}, {"sliding_window": 16}])
def test_attention_with_more_than_a_pattern_is_refused(options):
    """As of Gemma 2, of gpt-oss and of Mistral: transformers hands these on."""
    sparse().build("bigbird")
    [name] = options
    query = torch.zeros(1, 2, 32, 8)
    with pytest.raises(ValueError, match=f"expected no .*{name}"):
        AttentionInterface()["bigbird"](torch.nn.Module(), query, query, query, None, **options)
