"""Partly frozen models: what is frozen costs no gradient, no state and no reduction, and stays as it is.

The reference is DDP, to the bit on two ranks; for what is frozen and trained by turns, which DDP does not
follow, plain PyTorch with gradients averaged by hand.
"""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zeroshard
from tests.distributed.models import Tiny
from tests.distributed.training import (
    STAGES,
    adamw,
    build,
    differences,
    finish,
    live_bytes,
    lora,
    same_as_replicated,
    square_loss,
    start,
    step,
    token_loss,
    train,
    train_replicated,
    unequal,
)
from tests.ranks import on_ranks

peft = pytest.importorskip("peft")


# ------------------------------------------------------------------------------------------------ parity


@on_ranks(2, timeout=120)
def test_adapters_train_as_in_ddp_to_the_bit():
    models = {
        name: same_as_replicated(lora(**options), num_steps=2)
        for name, options in {
            "plain": {},
            "frozen in bf16": {"dtype": torch.bfloat16},
            "checkpoints": {"checkpoints": True},
            "gradients end before the first layer": {"layers_to_transform": [1]},
            "weights decomposed": {"use_dora": True},
            "a head beside": {"modules_to_save": ["lm_head"]},
        }.items()
    }
    configs = {
        str(config): same_as_replicated(lora(), num_steps=2, **config)
        for config in ({"recompute": "unit"}, {"num_prefetch": 3})
    }
    found = models | configs
    assert {name: lines for name, lines in found.items() if lines} == {}


# ------------------------------------------------------------------------------------- memory and traffic


def sizes(engine):
    """Padded elements, by requires_grad."""
    groups, n = {}, dist.get_world_size()
    for parameter in engine.parameters():
        key = parameter.unit_name, parameter.requires_grad
        groups[key] = groups.get(key, 0) + -(-parameter.full_shape.numel() // 256) * 256
    row = 256 * n
    padded = {key: -(-total // row) * row for key, total in groups.items()}
    return {kind: sum(total for key, total in padded.items() if key[1] is kind) for kind in (True, False)}


@pytest.mark.long_where(param_dtype=["bf16"])
@pytest.mark.parametrize(
    ("dtype", "param_dtype"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "bf16")]
)
@on_ranks(2, timeout=120)
def test_what_is_frozen_is_held_in_its_dtype_and_is_neither_reduced_nor_gathered_below_stage_3(
    dtype, param_dtype
):
    n, size = dist.get_world_size(), 4 if param_dtype is None else 2
    for stage in STAGES:
        gc.collect()
        gc.freeze()
        engine, optimizer = start(lora(dtype), stage=stage, precision={"param_dtype": param_dtype})
        for number in range(2):
            engine.reset_comm_report()
            optimizer.zero_grad()
            token_loss(engine, number).backward()
            optimizer.step()
        P, sent, report = sizes(engine), engine.comm_report().bytes_sent, engine.memory_report()
        with torch.no_grad():
            token_loss(engine, 0)
        frozen_bytes, copy_bytes = (4, 0) if param_dtype is None else (2, 2)
        frozen_bytes = 2 if dtype is torch.bfloat16 else frozen_bytes
        gradients = 4 * (1 if stage == 0 else 1 / n)
        main = {0: 4, 1: 4, 2: 4, 3: 4 / n}[stage] if not copy_bytes else gradients + (stage < 3) * copy_bytes
        parameters = P[False] * frozen_bytes / (n if stage == 3 else 1) + P[True] * main
        own = sum(p.numel() for p in engine.parameters() if p.requires_grad)
        total = parameters + P[True] * gradients + 8 * own
        if stage == 3 and dtype is torch.float32:  # one dtype on the wire
            kept = sum(unit.numel for unit in engine.units if unit.kept)
            assert sent["all_gather"] == frozen_bytes * (2 * sum(P.values()) - kept) * (n - 1) // n
        share = P[True] * (n - 1) // n
        assert live_bytes() == pytest.approx(total, rel=0.02), stage
        assert report.parameters == parameters
        assert sent["reduce_scatter"] == 4 * share
        assert stage == 3 or sent["all_gather"] == (4 if stage == 0 else size) * share
        del engine, optimizer


@on_ranks(2)
def test_frozen_units_before_all_that_is_trained_are_not_gathered_for_backward():
    """Elements gathered in a step whose first block needs no backward, and those of its two gathers."""
    model = Tiny(3)
    model.inner.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    engine, optimizer = start(model, stage=3)
    for number in range(2):
        engine.reset_comm_report()
        step(engine, optimizer, square_loss, number)
    sent = engine.comm_report().bytes_sent["all_gather"] // 4
    size = {unit.name: unit.numel // 2 for unit in engine.units}
    kept = [unit.name for unit in engine.units if unit.kept]
    want = sum(size.values()) + size["blocks.1"]
    assert kept == ["", "blocks.2"]
    assert sent == want


# ------------------------------------------------------------------------------- frozen and trained by turns


def turn(net, number):
    """What is frozen changes before steps 1, 2 and 4, through the module, as one does in plain PyTorch."""
    if number == 1:
        net.blocks[0].requires_grad_(False)
        net.gain.requires_grad = False
    if number == 2:
        net.requires_grad_(False)
        net.outer.weight.requires_grad = True
    if number == 4:
        net.requires_grad_(True)


def train_by_turns(**config):
    torch.manual_seed(0)
    model, found = Tiny(2), []
    replica = copy.deepcopy(model)
    made = adamw(replica.parameters())

    def run(net, optimizer, module):
        losses, having = [], []
        for number in range(6):
            turn(module, number)
            loss = square_loss(net, number)
            loss.backward()
            if net is replica:
                average(net)
            having.append({name for name, p in module.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return finish(net, losses), having

    want, wanted = run(replica, made, replica)
    for stage in STAGES:
        sharded = copy.deepcopy(model)
        engine, made = start(sharded, adamw(sharded.parameters()), stage=stage, **config)
        got, having = run(engine, made, engine.module)
        found += differences(f"stage {stage}", got, want)
        found += [] if having == wanted else [(stage, having)]
    assert len(wanted[0]) > len(wanted[1]) > len(wanted[2]) == 1
    return found


def average(net):
    """DDP itself keeps what it saw when it was built."""
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


@on_ranks(2)
def test_what_was_trained_can_be_frozen_and_trained_again_between_steps():
    return train_by_turns() + train_by_turns(recompute="unit")


@on_ranks(2)
def test_adapters_can_be_disabled_for_a_reference_and_go_on_training():
    """As preference losses do: the same model without its adapters gives the reference."""
    model = lora()
    with torch.no_grad(), model.disable_adapter():
        want = token_loss(model, 0)
    replica = train_replicated(model, "AdamW", 2)
    engine, optimizer = start(model)
    losses, references = [], []
    for number in range(2):
        with torch.no_grad(), model.disable_adapter():
            references.append(token_loss(engine, 0))
        losses.append(step(engine, optimizer, token_loss, number))
    assert all(torch.equal(reference, want) for reference in references)
    return differences("", finish(engine, losses), replica)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_what_was_frozen_at_initialize_cannot_be_trained_and_is_named(stage):
    model = Tiny()
    model.inner.requires_grad_(False)
    engine, _ = start(model, stage=stage)

    class Thaw:
        def __call__(self, module, args):
            module.weight.requires_grad_(True)

    def outside():
        dict(engine.named_parameters())["inner.weight"].requires_grad_(True)

    def by_module():
        engine.requires_grad_(True)

    def under_unsharded():
        with engine.unsharded():
            model.inner.weight.requires_grad = True

    def inside_forward():
        handle = model.inner.register_forward_pre_hook(Thaw())
        try:
            square_loss(engine, 0).backward()
        finally:
            handle.remove()

    for way in (outside, by_module, under_unsharded, inside_forward):
        with pytest.raises(RuntimeError) as caught:
            way()
        message = str(caught.value)
        assert "'inner." in message
        assert "frozen at initialize" in message


@on_ranks(2)
def test_what_is_frozen_under_unsharded_stays_frozen():
    model = Tiny()
    engine, _ = start(model)
    with engine.unsharded(model.inner):
        model.inner.requires_grad_(False)
    square_loss(engine, 0).backward()
    assert {name for name, p in engine.named_parameters() if p.grad is None} == {"inner.weight", "inner.bias"}


# --------------------------------------------------------------------------------- reading and evaluating


@on_ranks(2, timeout=120)
def test_adapters_can_be_read_saved_and_merged_under_unsharded():
    model, found = lora(), []
    want = train_replicated(model, "AdamW", 2).parameters
    keys = peft.get_peft_model_state_dict(model).keys()
    engine, optimizer = start(model)
    train(engine, optimizer, 2)
    whole = engine.full_state_dict()
    found += unequal("full_state_dict", whole, want if whole else {})
    with engine.unsharded():
        shown = {name: p.detach().clone() for name, p in model.named_parameters()}
        adapters = {name: p.clone() for name, p in peft.get_peft_model_state_dict(model).items()}
    found += unequal("unsharded", shown, {name: want[name] for name in shown})
    found += unequal("adapters", adapters, {k: want[k.replace(".weight", ".default.weight")] for k in keys})
    plain_model = lora()
    plain_model.load_state_dict(want)
    with engine.unsharded(write_back=True):
        model.merge_adapter()
    plain_model.merge_adapter()
    whole = engine.full_state_dict()
    found += unequal("merged in place", whole, plain_model.state_dict() if whole else {})
    losses = [token_loss(net, 7).item() for net in (engine, plain_model)]
    return found if losses[0] == losses[1] else [*found, losses]


@on_ranks(2)
def test_a_frozen_model_is_evaluated_and_gathered_once():
    """A model that is all frozen, without and with gradients enabled: losses, elements gathered."""
    model = build("tied transformers Llama").requires_grad_(False).eval()
    want, found = token_loss(model, 0).item(), []
    for stage in STAGES:
        engine = zeroshard.initialize(copy.deepcopy(model), None, {"stage": stage}).engine
        for enabled in (False, False, True):
            engine.reset_comm_report()
            with torch.set_grad_enabled(enabled):
                got = token_loss(engine, 0).item()
            sent = engine.comm_report().bytes_sent
            share = 4 * sum(unit.numel for unit in engine.units) // 2 if stage == 3 else 0
            if (got, sent["all_gather"], sent["reduce_scatter"]) != (want, share, 0):
                found.append((stage, enabled, got, want, dict(sent), share))
    return found


@on_ranks(2)
def test_frozen_weights_are_rounded_to_the_dtype_in_which_they_are_held(tmp_path):
    for stage, overrides in ((stage, overrides) for stage in STAGES for overrides in (None, {"0": "fp32"})):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
        want = model[0].requires_grad_(False).weight.detach().clone()
        want = want if overrides else want.bfloat16()
        precision = {"param_dtype": "bf16", "overrides": overrides}
        config = {"stage": stage, "precision": precision}
        engine = zeroshard.initialize(model, torch.optim.SGD(model[1].parameters(), lr=0.1), config).engine
        file = f"{tmp_path}/{stage}-{overrides is None}"
        engine.save_pretrained(file)
        values = [engine.full_parameter("0.weight"), dict(engine.named_full_parameters())["0.weight"]]
        values += [load_file(f"{file}/model.safetensors")["0.weight"]]
        engine.close()
        values += [model[0].weight]
        narrow = torch.float32 if overrides else torch.bfloat16
        assert [value.dtype for value in values] == [torch.float32, narrow, narrow, torch.float32]
        assert all(torch.equal(value.float(), want.float()) for value in values)
