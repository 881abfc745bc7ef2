"""Muon: the bits of one process at any number of ranks, stage and mesh, and torch's own Muon near by.

Gradients are given by name, so they are the same at any number of ranks.
"""

import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import ALL_STAGES, refused, seeded, start
from tests.optim.matrices import (
    FUSED,
    Net,
    give_gradients,
    gradient,
    is_used,
    step_plainly,
    step_sharded,
    unequal,
)
from tests.ranks import on_ranks
from zeroshard.optim import Deferred, Muon, muon_groups
from zeroshard.optim.muon import orthogonalize
from zeroshard.stepping.wholes import Key

NUM_STEPS = 5
MUON = {"lr": 0.02, "momentum": 0.9}
ADAMW = {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.05}


def optimizer_of(model):
    return Muon(muon_groups(model, muon=MUON, adamw=ADAMW, split={"*fused": FUSED}))


def plain():
    """Zeroshard's Muon in one process, over a model that is not sharded."""
    model = seeded(Net)
    step_plainly(model, optimizer_of(model), range(NUM_STEPS))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def parts_of(name, whole):
    """The matrices of a parameter."""
    if name.endswith("fused"):
        return whole.split(FUSED)
    return whole.unbind() if name.endswith("experts") else [whole]


def by_torch():
    """Torch's own Muon and AdamW, with a parameter of its own for each matrix."""
    hidden = ("wide.weight", "tall.weight", "experts", "fused", "sometimes", "row", "unused")
    named = dict(seeded(Net).named_parameters())
    parts = {name: [nn.Parameter(q.clone()) for q in parts_of(name, p.detach())] for name, p in named.items()}
    lists = [], []
    for name, p in named.items():
        lists[not (name.endswith(hidden) and p.requires_grad)].extend(parts[name])
    optimizers = [torch.optim.Muon(lists[0], **MUON), torch.optim.AdamW(lists[1], **ADAMW)]
    for step in range(NUM_STEPS):
        for name, p in named.items():
            grads = parts_of(name, gradient(name, step, p.shape))
            for q, grad in zip(parts[name], grads, strict=True):
                q.grad = grad.clone() if is_used(name, step) else None
        for optimizer in optimizers:
            optimizer.step()
    flat = {name: torch.cat([q.detach().reshape(-1) for q in own]) for name, own in parts.items()}
    return {name: whole.view(named[name].shape) for name, whole in flat.items()}


def muon(**config):
    model = seeded(Net)
    return start(model, optimizer_of(model), **config)


# ------------------------------------------------------------------------------------------ one process


def test_in_one_process_matrices_follow_torchs_muon_and_all_else_its_adamw():
    got, want = plain(), by_torch()
    for name, value in want.items():
        if name.endswith("fused"):  # scaled before it is subtracted, because its matrices have other shapes
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6)
        else:
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "lr": 3e-3},
        {"adjust_lr_fn": "original", "weight_decay": 0.0},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
        {"momentum": 0.0},
    ],
)
def test_every_hyperparameter_means_what_it_does_to_torch(options):
    """At last its state dict goes on here."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((30, 50), (50, 30), (16, 16))]
    theirs = copy.deepcopy(ours)
    one, other = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for step in range(5):
        if step == 4:
            one = Muon(ours)
            one.load_state_dict(copy.deepcopy(other.state_dict()))
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        one.step()
        other.step()
    assert all(map(torch.equal, ours, theirs))


def test_spectral_unclamped_scales_by_the_root_of_rows_over_columns():
    weight = nn.Parameter(torch.zeros(10, 40))
    weight.grad = torch.randn(10, 40)
    optimizer = Muon([weight], lr=0.5, adjust_lr_fn="spectral_unclamped")
    update = orthogonalize(weight.grad, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    with torch.no_grad():
        want = torch.zeros(10, 40).add_(update, alpha=-0.5 * math.sqrt(10 / 40))
    optimizer.step()
    # The direction is that of the first gradient: momentum scales it, and the norm is divided out.
    torch.testing.assert_close(weight.detach(), want, rtol=0, atol=1e-2)


@pytest.mark.parametrize("before", [True, False])
def test_states_of_the_other_kind_of_group_are_refused_before_anything_changes(before):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 6)) for _ in range(2)]
    optimizers = [Muon([{"params": [p], "use_muon": use} for p in weights]) for use in (before, not before)]
    for p in weights:
        p.grad = torch.randn(4, 6)
    optimizers[0].step()
    optimizers[1].state[weights[1]].update(optimizers[0].state[weights[1]])
    values = [p.detach().clone() for p in weights]
    with pytest.raises(RuntimeError, match="group 1 has states of the other value of use_muon"):
        optimizers[1].step()
    assert all(map(torch.equal, weights, values))
    assert weights[0] not in optimizers[1].state


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4, 5)])
def test_a_parameter_without_matrices_is_refused_by_its_name(shape):
    parameter = nn.Parameter(torch.ones(shape))
    advice = "expected a matrix of floats, or a stack of matrices, got shape .* use_muon=False"
    with pytest.raises(ValueError, match=f"'block.gain': {advice}"):
        Muon([("block.weight", nn.Parameter(torch.ones(2, 2))), ("block.gain", parameter)])
    with pytest.raises(ValueError, match=f"parameter 1 of group 0: {advice}"):
        Muon([nn.Parameter(torch.ones(2, 2)), parameter])


# ----------------------------------------------------------------------------------------- the groups


def names_of(groups):
    return [sorted(name for name, _ in group["params"]) for group in groups]


def test_hidden_matrices_go_to_muon_and_all_else_to_adamw():
    groups = muon_groups(seeded(Net), muon=MUON, adamw=ADAMW, split={"*fused": FUSED})
    layers = [f"layers.{at}." for at in range(2)]
    hidden = ("wide.weight", "tall.weight", "experts", "sometimes")
    assert names_of(groups) == [
        sorted(["row", "unused", "empty", *(layer + name for layer in layers for name in hidden)]),
        sorted(layer + "fused" for layer in layers),
        sorted(["embedding.weight", "lm_head.weight"]
               + [layer + name for layer in layers for name in ("wide.bias", "gain")]),
    ]  # fmt: skip
    assert [group["use_muon"] for group in groups] == [True, True, False]
    assert groups[1]["split"] == FUSED
    assert groups[0]["lr"] == MUON["lr"]
    assert groups[2]["betas"] == ADAMW["betas"]


class Odd(nn.Module):
    """Parameters that look like matrices and are none, and those that are tied."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.proj = nn.Linear(4, 9, bias=False)
        self.proj.weight = self.tokens.weight
        self.conv = nn.Conv1d(4, 4, 3)
        self.pos_embed = nn.Parameter(torch.ones(1, 7, 4))
        self.cls = nn.Parameter(torch.ones(1, 2, 4))
        self.gate_up_proj_bias = nn.Parameter(torch.ones(3, 4))
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, 9, bias=False)

    def get_output_embeddings(self):
        return self.out


def test_embeddings_ties_convolutions_biases_and_output_embeddings_are_no_hidden_matrices():
    assert names_of(muon_groups(Odd()))[0] == ["hidden.weight"]
    assert len(muon_groups(Odd(), exclude=["hidden.weight"])) == 1
    assert names_of(muon_groups(nn.Linear(3, 3, bias=False))) == [["weight"]]
    for option in ({"exclude": ["hiden*"]}, {"split": {"hiden*": 2}}):
        with pytest.raises(ValueError, match=r"expected the name of a parameter, got 'hiden\*'"):
            muon_groups(Odd(), **option)


def test_a_tied_parameter_has_all_of_its_names():
    model = Odd()
    model.twin = nn.Linear(4, 4, bias=False)
    model.twin.weight = model.hidden.weight
    assert "hidden.weight" in names_of(muon_groups(model, exclude=["twin.*"]))[-1]
    assert [group.get("split") for group in muon_groups(model, split={"twin.*": 2})] == [2, None]
    model.token_embed = model.hidden.weight
    assert len(muon_groups(model)) == 1


def test_a_split_is_refused_where_fused_matrices_lie_beside_each_other():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 12, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with pytest.raises(ValueError, match=r"would cut 'transformer.h.0.attn.c_attn.weight' between inputs"):
        muon_groups(model, split={"*.c_attn.weight": 3})
    assert "transformer.h.0.attn.c_attn.weight" in names_of(muon_groups(model))[0]


def test_the_last_layer_is_no_hidden_matrix_where_peft_trains_a_copy_of_it():
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, pad_token_id=0, **sizes)
    model = transformers.LlamaForSequenceClassification(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS"))
    hidden, others = names_of(muon_groups(model))
    assert others == ["base_model.model.score.modules_to_save.default.weight"]
    assert all(".lora_" in name for name in hidden)


# ------------------------------------------------------------------------------------------- sharded


def shard(configs, want):
    """Differences from one process, exchanges of a step, and parameters that this rank has nothing of."""
    found, num_unowned = [], 0
    for config in configs:
        engine, optimizer = muon(**config)
        step_sharded(engine, optimizer, range(1))
        engine.reset_comm_report()
        step_sharded(engine, optimizer, range(1, 2))
        calls = engine.comm_report().calls["all_to_all"]
        most = {0: 1}.get(config["stage"], 2) if dist.get_world_size() > 1 else 0
        found += [] if calls == most else [(config, "exchanges", calls)]
        step_sharded(engine, optimizer, range(2, NUM_STEPS))
        found += [(config, name) for name in unequal(engine.full_state_dict(), want)]
        num_unowned = sum(not p.numel() for p in engine.parameters())
    return found, num_unowned


@pytest.mark.long_where(num_ranks=[1, 3, 4])
@pytest.mark.parametrize(("num_ranks", "group"), [(1, None), (2, None), (3, None), (4, 2)])
def test_all_stages_give_the_bits_of_one_process_with_one_exchange_each_way(ranks, num_ranks, group):
    configs = [{"stage": stage} for stage in ((0, 3) if num_ranks == 2 else ALL_STAGES)]
    if group is not None:
        configs = [{"stage": stage, "shard_group_size": group} for stage in (1, 3)]
    answers = ranks(num_ranks, shard, configs, plain())
    assert [found for found, _ in answers] == [[]] * num_ranks
    if num_ranks > 1:
        assert max(num_unowned for _, num_unowned in answers) > 1


@on_ranks(2)
def test_a_step_without_any_gradient_exchanges_and_changes_nothing():
    engine, optimizer = muon(stage=3)
    engine.reset_comm_report()
    optimizer.step()
    assert (engine.comm_report().calls["all_to_all"], len(optimizer.state)) == (0, 0)


@on_ranks(2)
def test_it_works_with_the_composable_layer_and_slices_are_never_taken_for_the_whole():
    model = seeded(Net)
    runtime = zeroshard.shard(model, {"stage": 3})
    matrices = [(name, p) for name, p in model.named_parameters() if "tall" in name or name == "row"]
    with pytest.raises(ValueError, match=r"'layers\.0\.wide\.bias': expected a matrix"):
        Muon([p for p in model.parameters() if p.fqn.endswith("bias")])
    unattached, optimizer = Muon(matrices, **MUON), Muon(matrices, **MUON)
    runtime.attach(optimizer)
    for step in range(NUM_STEPS):
        for name, p in matrices:
            sizes = [None] * dist.get_world_size()
            dist.all_gather_object(sizes, p.numel())
            p.grad = gradient(name, step, p.full_shape).flatten().split(sizes)[dist.get_rank()].clone()
        if step == 0:
            with pytest.raises(RuntimeError, match=r"this rank holds a slice of '.*attach\(\)"):
                unattached.step()
        optimizer.step()
    whole, want = runtime.full_state_dict(), plain()
    assert not [name for name, _ in matrices if whole and not torch.equal(whole[name], want[name])]


@on_ranks(1)
def test_parameters_of_a_module_that_it_was_not_attached_to_are_refused_by_name():
    model, other = seeded(Net), seeded(Net)
    runtime, _ = zeroshard.shard(model, {"stage": 3}), zeroshard.shard(other, {"stage": 3})
    optimizer = Muon([other.row])
    runtime.attach(optimizer)
    other.row.grad = torch.zeros_like(other.row)
    expected = r"expected parameters of the one sharded module.*got 'row' of shape \[300\] of another module"
    with pytest.raises(RuntimeError, match=expected):
        optimizer.step()


@on_ranks(2)
def test_a_gradient_that_one_rank_has_dropped_is_an_error_on_all_ranks():
    engine, optimizer = muon(stage=3)
    step_sharded(engine, optimizer, range(1))
    give_gradients(engine, 0)
    for name, p in engine.named_parameters():
        if dist.get_rank() == 1 and name.endswith("tall.weight"):
            p.grad = None
    message = refused(optimizer.step)
    for text in ("with 17 whole tensors", "with 19 whole tensors", "be None on all of them"):
        assert text in message


def deferred(stage):
    """The parameters for which this rank has made a deferred tensor, and those that it has computed."""
    engine, optimizer = muon(stage=stage)
    parameters = [p for p in engine.parameters() if len(p.full_shape) == 2]
    seen, owned = [], []

    def make(number):
        seen.append(number)
        return parameters[number].detach().double()

    def compute(wholes, keys):
        owned.extend(key.parameter for key in keys)
        return [whole.mul_(2) for whole in wholes]

    tensors = [Deferred(partial(make, at), p, torch.float64) for at, p in enumerate(parameters)]
    updates = optimizer.wholes_of(parameters, tensors, compute)
    are_right = all(map(torch.equal, updates, [2 * p.detach().double() for p in parameters]))
    return are_right, sorted(seen), sorted(owned), len(parameters)


def test_deferred_tensors_are_made_once_and_only_where_they_are_needed(ranks):
    (right, first, owned, number), (other_right, second, others, _) = ranks(2, deferred, 0)
    assert right
    assert other_right
    assert first == owned  # each rank holds all of them, so none is sent
    assert second == others
    assert 0 < len(first) < number
    for right, seen, _, _ in ranks(2, deferred, 3):
        assert right
        assert len(seen) == len(set(seen))


# ---------------------------------------------------------------------------- the rest of the API


def test_keys_name_the_matrices_of_a_call():
    seen = []
    tensors = [torch.arange(12.0).view(6, 2), torch.ones(3)]

    def double(wholes, keys):
        seen.extend(zip(keys, [tuple(whole.shape) for whole in wholes], strict=True))
        return [whole.mul_(2) for whole in wholes]

    parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
    got = Muon.wholes_of(parameters, tensors, double, shapes=[[(2, 2), (4, 2)], [(3,)]])
    assert seen == [(Key(0, 0), (2, 2)), (Key(0, 1), (4, 2)), (Key(1, 0), (3,))]
    assert all(torch.equal(one, 2 * other) for one, other in zip(got, tensors, strict=True))
    with pytest.raises(ValueError, match=r"expected shapes that fill a parameter of shape \(6, 2\)"):
        Muon.wholes_of(parameters, tensors, double, shapes=[[(2, 2)], [(3,)]])
    with pytest.raises(ValueError, match=r"expected \[6, 2\] torch.float32 for Key\(.*got \[6\]"):
        Muon.wholes_of(parameters, tensors, lambda wholes, keys: [whole.sum(-1) for whole in wholes])
    with pytest.raises(ValueError, match=r"expected \[3\] torch.float32 for Key\(.*got None"):
        Muon.wholes_of(parameters, tensors, lambda wholes, keys: wholes[:1])
    with pytest.raises(ValueError, match=r"expected None for None, got \[3\]"):
        Muon.wholes_of(parameters, tensors, lambda wholes, keys: [*wholes, wholes[1]])
