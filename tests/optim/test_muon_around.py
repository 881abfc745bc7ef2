"""Muon with all that happens around a step: the bits do not depend on the number of ranks, or it is refused.

The gradients are multiples of 1/64, so their mean over two or four ranks is exact.
"""

import pytest

import zeroshard
from tests.distributed.training import STAGES, numbers, own_loss, start, take_steps
from tests.optim.matrices import net_with_zeros, unequal
from tests.parallel import runs
from tests.parallel.pipeline import runs as pipelined
from tests.ranks import on_ranks
from zeroshard.optim import Muon, muon_groups

NUM_STEPS = 6
MUON = {"lr": 0.02, "weight_decay": 0.01}
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


def optimizer_of(model, **more):
    return Muon(muon_groups(model, muon=MUON, adamw=ADAMW, **more))


def run(stage, want=None):
    """The parameters of bfloat16 after all steps, or those that differ; the fuzz has other precisions."""
    model, precision = net_with_zeros(), {"main_dtype": "bf16", "param_dtype": "bf16"}
    engine, _ = start(model, optimizer_of(model), stage=stage, precision=precision)
    take_steps(engine, range(NUM_STEPS), own_loss)
    state = engine.full_state_dict()
    engine.close(restore=False)
    return state if want is None else unequal(state, want)


def test_steps_have_the_same_bits_on_one_rank_and_on_several(ranks):
    (want,) = ranks(1, run, 3)
    for stage in STAGES:
        assert ranks(2, run, stage, want) == [[]] * 2


@on_ranks(2)
def test_steps_in_backward_are_refused_by_name():
    model = net_with_zeros()
    with pytest.raises(ValueError, match=r"offload\.step_in_backward: expected an optimizer.* got Muon"):
        start(model, optimizer_of(model), stage=3, offload={"step_in_backward": True})


# ------------------------------------------------------------------------------- tensor parallelism


def gradient(name, step, shape):
    return numbers(step + 1000 * len(name), *shape, rank=sum(map(ord, name)) % 97)


def divided_optimizer(model):
    return optimizer_of(model, split={"*.up.weight": 4, "*.q.weight": (10, 6)})


def divided_plainly():
    model = runs.small_gpt(0).float()
    optimizer = divided_optimizer(model)
    for step in range(NUM_STEPS):
        for name, p in model.named_parameters():
            p.grad = gradient(name, step, p.shape)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(("num_ranks", "stages"), [(2, (3,)), (4, (0, 1))])
@on_ranks()
def test_tensor_ranks_compute_with_whole_matrices(stages):
    for stage in stages:
        model = runs.small_gpt(0).float()
        optimizer, config = divided_optimizer(model), {"stage": stage, "mesh": {"tp": 2}}
        engine = zeroshard.initialize(model, optimizer, config, tp_plan=runs.PLAN).engine
        shapes = {name: p.full_shape for name, p in engine.named_parameters()}
        for step in range(NUM_STEPS):
            for name, shape in shapes.items():
                engine.set_full_gradient(name, gradient(name, step, shape))
            engine.reset_comm_report()
            optimizer.step()
            assert engine.comm_report().calls["all_to_all"] <= 2
        assert not unequal(engine.full_state_dict(), divided_plainly())
        engine.close(restore=False)


# ------------------------------------------------------------------------------------------ pipelines


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
