"""Muon with all that happens around a step: the bits do not depend on the number of ranks, or it is refused.

The gradients are multiples of 1/64, so their mean over two or four ranks is exact.
"""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

import zeroshard
from tests.distributed import training
from tests.distributed.training import STAGES, numbers, token_loss, tokens
from tests.optim.test_layerwise import build
from tests.optim.test_muon import unequal
from tests.parallel import runs
from tests.parallel.pipeline import runs as pipelined
from zeroshard.optim import Muon, muon_groups

NUM_STEPS = 6
MUON = {"lr": 0.02, "weight_decay": 0.01}
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


def optimizer_of(model, **more):
    return Muon(muon_groups(model, muon=MUON, adamw=ADAMW, **more))


def halving(optimizer):
    return LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1 / (step + 1)])


def start(config, **more):
    model = build()
    return zeroshard.initialize(model, optimizer_of(model), config, **more).engine


def go_on(engine, steps):
    for step in steps:
        engine.backward(engine(step))
        engine.step()


CASES = {
    "plain": {},
    "clipping": {"clip_grad_norm": 3.0},
    "float16": {"precision": {"param_dtype": "float16"}, "clip_grad_norm": 3.0},
    "bf16 main": {"precision": {"main_dtype": "bf16", "param_dtype": "bf16"}},
    "on the host": {"offload": {"optimizer": "cpu"}},
    "accumulation": {"gradient_accumulation_steps": 2},
}


def run(config):
    engine = start(config)
    go_on(engine, range(NUM_STEPS))
    taken, state = engine.global_step, engine.full_state_dict()
    engine.close(restore=False)
    return taken, state


def run_stages(configs, want):
    """Differences from a run of one rank."""
    found = []
    for config in configs:
        taken, state = run(config)
        found += [] if taken == want[0] else [(config, taken)]
        found += [(config, name) for name in unequal(state, want[1])]
    return found


@pytest.mark.long_where(case=["on the host", "plain", "bf16 main"])
@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_steps_have_the_same_bits_on_one_rank_and_on_several(ranks, case, num_ranks):
    config = CASES[case]
    ((taken, state),) = ranks(1, run, config | {"stage": 3})
    configs = [config | {"stage": stage} for stage in STAGES]
    if num_ranks == 4:
        configs.append(config | {"stage": 3, "shard_group_size": 2})
    assert ranks(num_ranks, run_stages, configs, (taken, state)) == [[]] * num_ranks
    skipped = 0 < taken < NUM_STEPS if case == "float16" else taken == NUM_STEPS
    assert skipped or case == "accumulation"


def in_files(folder, want):
    config = {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": str(folder)}}
    return run_stages([config], want)


def test_main_parameters_in_files_have_the_same_bits(ranks, tmp_path):
    (want,) = ranks(1, run, {"stage": 3})
    assert ranks(2, in_files, tmp_path, want) == [[]] * 2


def stepping_in_backward():
    try:
        start({"stage": 3, "offload": {"step_in_backward": True}})
    except ValueError as error:
        return str(error)


def test_steps_in_backward_are_refused_by_name(ranks):
    for message in ranks(2, stepping_in_backward):
        assert "offload.step_in_backward: expected an optimizer" in message
        assert "got Muon" in message


def skipping(stage):
    """Parameters before and after a step whose gradients are not finite on one rank."""
    engine = start({"stage": stage, "nonfinite": "skip"})
    go_on(engine, range(2))
    before = engine.full_state_dict()
    loss = engine(2)
    engine.backward(loss * (math.inf if engine.dp_rank == 1 else 1))
    was_taken = engine.step()
    return was_taken, unequal(engine.full_state_dict(), before)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_is_left_out_changes_nothing(ranks, stage):
    assert ranks(2, skipping, stage) == [(False, [])] * 2


# --------------------------------------------------------------------------------------- checkpoints


def save(folder, stage):
    engine = start({"stage": stage}, lr_scheduler=halving)
    go_on(engine, range(3))
    engine.save_checkpoint(folder)


def resume(folder, stage):
    engine = start({"stage": stage}, lr_scheduler=halving)
    engine.load_checkpoint(folder)
    go_on(engine, range(3, NUM_STEPS))
    states = {name: sorted(engine.full_optimizer_state(name)) for name in ("weight", "bias", "unused")}
    return engine.full_state_dict(), states


def through(stage):
    engine = start({"stage": stage}, lr_scheduler=halving)
    go_on(engine, range(NUM_STEPS))
    return engine.full_state_dict()


def test_a_run_that_was_saved_goes_on_with_the_same_bits_at_any_layout(ranks, tmp_path):
    (want,) = ranks(1, through, 3)
    ranks(2, save, tmp_path, 3)
    for num_ranks, stage in ((1, 3), (2, 0), (4, 1)):
        (got, states), *_ = ranks(num_ranks, resume, tmp_path, stage)
        assert unequal(got, want) == []
        names = {"weight": ["momentum_buffer"], "bias": ["exp_avg", "exp_avg_sq", "step"], "unused": []}
        assert states == names


# --------------------------------------------------------------------------------- a small Llama


def llama(dtype):
    return training.build("Llama").to(dtype)


def torchs(model):
    """Torch's own Muon and AdamW over the groups of a model."""
    hidden, others = muon_groups(model)
    matrices = torch.optim.Muon([p for _, p in hidden["params"]], **MUON)
    return [matrices, torch.optim.AdamW([p for _, p in others["params"]], **ADAMW)]


def beside_replicas():
    """Differences from torch's Muon over copies in DistributedDataParallel."""
    replica, losses = training.replicate(llama(torch.float32)), []
    optimizers = torchs(training.plain(replica))
    for step in range(4):
        loss = token_loss(replica, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    want, found = training.finish(replica, losses), []
    for stage in STAGES:
        model = llama(torch.float32)
        got = training.train(*training.start(model, optimizer_of(model), stage=stage), 4)
        found += training.differences(f"stage {stage}", got, want)
    return found


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_llama_trains_to_the_bits_of_torchs_muon_over_replicas(ranks, num_ranks):
    assert ranks(num_ranks, beside_replicas) == [[]] * num_ranks


NUM_PARTS = 4


def loss_of_part(model, step, part):
    """The loss of one of the batches that a step has over all ranks."""
    batch = tokens(step, rank=part)
    return F.cross_entropy(model(batch[:, :-1])["logits"].flatten(0, 1), batch[:, 1:].flatten())


def trained(stage):
    """Losses of steps, and parameters, over all ranks."""
    model, losses = llama(torch.float64), []
    num = NUM_PARTS // dist.get_world_size()
    config = {"stage": stage, "gradient_accumulation_steps": num}
    engine = zeroshard.initialize(model, optimizer_of(model), config).engine
    for step in range(4):
        total = torch.zeros(())
        for number in range(num):
            loss = loss_of_part(engine, step, number * engine.dp_world_size + engine.dp_rank)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / NUM_PARTS
        losses.append(engine._axes.dp.sum(total, "test").item())
    return losses, engine.full_state_dict()


def trained_plainly():
    """The same in one process, without an engine, by torch's Muon."""
    model, losses = llama(torch.float64), []
    optimizers = torchs(model)
    for step in range(4):
        parts = [loss_of_part(model, step, part) / NUM_PARTS for part in range(NUM_PARTS)]
        sum(parts).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(sum(parts).item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.long
@pytest.mark.long_where(num_ranks=[1, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_llama_trains_as_in_one_process(ranks, num_ranks):
    """In float64: in float32 another order of sums flips roundings to bfloat16, by 1/256 of an update."""
    want_losses, want = trained_plainly()
    for stage in STAGES:
        answers = ranks(num_ranks, trained, stage)
        for losses, _ in answers:
            assert losses == pytest.approx(want_losses, rel=1e-6)
        for name, value in answers[0][1].items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-9, msg=name)


# ------------------------------------------------------------------------------- tensor parallelism


def divided_values():
    return {name: p.detach().clone() for name, p in runs.build(0).float().named_parameters()}


def gradient(name, step, shape):
    return numbers(step + 1000 * len(name), *shape, rank=sum(map(ord, name)) % 97)


def divided_optimizer(model):
    return optimizer_of(model, split={"*.up.weight": 4, "*.q.weight": (10, 6)})


def divided_plainly():
    model = runs.build(0).float()
    optimizer = divided_optimizer(model)
    for step in range(NUM_STEPS):
        for name, p in model.named_parameters():
            p.grad = gradient(name, step, p.shape)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def divided(configs, want):
    found = []
    for config in configs:
        model = runs.build(0).float()
        optimizer = divided_optimizer(model)
        engine = zeroshard.initialize(model, optimizer, config, tp_plan=runs.PLAN).engine
        shapes = {name: p.full_shape for name, p in engine.named_parameters()}
        for step in range(NUM_STEPS):
            for name, shape in shapes.items():
                engine.set_full_gradient(name, gradient(name, step, shape))
            engine.reset_comm_report()
            optimizer.step()
            calls = engine.comm_report().calls["all_to_all"]
            found += [] if calls <= 2 else [(config, calls)]
        found += [(config, name) for name in unequal(engine.full_state_dict(), want)]
        engine.close(restore=False)
    return found


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.long)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tensor_ranks_compute_with_whole_matrices(ranks, num_ranks, stages):
    configs = [{"stage": stage, "mesh": {"tp": 2}} for stage in stages]
    assert ranks(num_ranks, divided, configs, divided_plainly()) == [[]] * num_ranks


@pytest.mark.long
def test_tensor_ranks_and_shard_groups_compute_with_whole_matrices(ranks):
    configs = [{"stage": 3, "mesh": {"tp": 2}, "shard_group_size": 2}]
    assert ranks(8, divided, configs, divided_plainly(), timeout=120) == [[]] * 8


# ------------------------------------------------------------------------------------------ pipelines


def pipeline(stage):
    config = {"stage": stage, "mesh": {"pp": 2}, "pipeline": {"num_microbatches": 4, "balance": "memory"}}
    model = pipelined.build("tied llama")
    engine = zeroshard.initialize(model, lambda _: optimizer_of(model), config).engine
    for number in range(3):
        tokens = pipelined.tokens_of(number).chunk(engine.dp_world_size)[engine.dp_rank]
        engine.train_batch({"input_ids": tokens}, tokens)
    return pipelined.parameters_of(engine)


def pipeline_plainly():
    model = pipelined.build("tied llama")
    optimizer = optimizer_of(model)
    for number in range(3):
        tokens = pipelined.tokens_of(number)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.long
@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_pipeline_ranks_step_the_matrices_of_their_own_part(ranks, num_ranks):
    want, seen = pipeline_plainly(), set()
    for found in ranks(num_ranks, pipeline, 1):
        for name, value in found.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-9, msg=name)
        seen |= found.keys()
    assert seen == want.keys()


def pipeline_groups(options):
    config = {"stage": 1, "mesh": {"pp": 2}, "watchdog_s": 10.0}
    model = pipelined.build("llama")
    try:
        engine = zeroshard.initialize(model, lambda _: optimizer_of(model, **options), config).engine
    except ValueError as error:
        return str(error)
    return [group.get("split") for group in engine.optimizer.param_groups]


def test_a_pattern_may_fit_parameters_of_another_pipeline_rank_alone(ranks):
    options = {"split": {"*layers.0.*q_proj.weight": 2}, "exclude": ["lm_head.*"]}
    assert ranks(2, pipeline_groups, options) == [[2, None, None], [None, None]]
    for message in ranks(2, pipeline_groups, {"exclude": ["lm_heat.*"]}):
        assert "exclude: expected the name of a parameter, got 'lm_heat.*', which fits none" in message
