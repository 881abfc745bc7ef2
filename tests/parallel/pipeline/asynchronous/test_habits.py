"""Asynchronous pipelines together with what users do: checkpoints, evaluation, schedules, dtypes, errors.

Lists of any length, evaluation and schedules of the learning rate are in `test_reference.py`.
"""

import functools
import re

import pytest
import torch
from torch import nn

from tests.checkpoint.runs import without_numba
from tests.distributed.training import refused
from tests.parallel.pipeline.asynchronous.runs import (
    WIDTH,
    assert_same,
    batch_of,
    begin,
    finish,
    method_of,
    model_of,
    runs,
    state_of,
    train,
)
from tests.ranks import on_ranks
from zeroshard.parallel.pipeline.schedules import steady

# ---------------------------------------------------------------------------------- dtypes and layouts

NARROW = {"param_dtype": "bf16", "main_dtype": "fp32"}


@without_numba
def runs_by_torch(*cases):
    return runs(*cases)


@pytest.mark.long
@pytest.mark.parametrize(("maker", "name"), [("adamw 8-bit", "pipedream"), ("adamw", "pipemare")])
def test_8_bit_states_and_bfloat16_give_the_same_bits_at_all_stages_and_in_shard_groups(ranks, maker, name):
    """Two data-parallel ranks; the sums of two gradients have one order."""
    arguments, options, layouts = (method_of(name, 2)[0], maker), {}, [{"stage": 0}, {"stage": 3}]
    if maker == "adamw":
        options = {"model": model_of(2).float(), "precision": NARROW}
        layouts += [{"stage": 1}, {"stage": 3, "shard_group_size": 1}]
    of_layouts = ((arguments, options | layout) for layout in layouts)
    for want, *others in ranks(4, runs_by_torch, *of_layouts):
        for layout, found in zip(layouts[1:], others, strict=True):
            assert found.losses == want.losses, layout
            assert_same(found.state, want.state, layout)


KEPT = [
    ({"schedule": "pipedream"}, [3, 2, 1, 0]),
    ({"schedule": "pipedream", "weights": "vertical"}, [3, 3, 3, 3]),
    ({"schedule": "2bw"}, [1, 1, 1, 1]),
    ({"schedule": "pipemare"}, [0, 0, 0, 0]),
]


def test_the_memory_of_versions_is_that_of_the_papers(ranks):
    """4 pipeline ranks with one data-parallel rank: versions beside the newest one, in its dtype.

    Narayanan et al. 2019, section 3.3, and 2021, section 3.1; Yang et al. 2021, section 3.2.
    """
    model = model_of(4).float()
    of_all = [((pipeline, "adamw", 4, (0,), 8, model), {"stage": 0}) for pipeline, _ in KEPT]
    found = ranks(4, runs, *of_all)
    for number, (pipeline, versions) in enumerate(KEPT):
        own = [of_rank[number] for of_rank in found]
        assert [one.peak_versions / one.size / 4 for one in own] == versions, pipeline


# ---------------------------------------------------------------------------------------------- errors


class Tied(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self[3].weight = self[0].weight


def with_a_half():
    model = model_of(2).float()
    model[3].half()
    return model


SINGLE = {"schedule": "paci", "microbatches_per_step": 1}
CROSSES = "a micro-batch crosses 3 steps between its forward and its backward"
PB, LWP = {"schedule": "pb"}, {"schedule": "lwp"}
SPIKE = PB | {"correction": "spike"}
ASYNCHRONOUS = "an asynchronous pipeline: expected parameters of "
REFUSED = [
    ({"schedule": "spectrain"}, ("lion",), "pipeline.weights='predict' moves weights along the next update"),
    ({"schedule": "spectrain"}, ("adamw 8-bit",), "momentum, Adam or AdamW, got AdamW8bit"),
    (LWP, ("plain sgd",), "weights='lwp' with SGD: momentum: expected a number above 0, got 0"),
    (LWP, ("nesterov",), "weights='lwp' with SGD: nesterov: expected False, got True"),
    (SPIKE, ("adamw",), "expected torch.optim.SGD with momentum"),
    (SPIKE, ("heavy",), "SGD: momentum: expected a number above 0 and below 1"),
    (SINGLE | {"max_crossed_steps": 2}, ("sgd", 4), f"pipeline.max_crossed_steps=2: {CROSSES}"),
    # Lists that are short or synchronous cross fewer steps than those that follow them.
    (SINGLE | {"num_microbatches": 2}, ("sgd", 4), f"pipeline.max_crossed_steps=1: {CROSSES}"),
    (SINGLE | {"num_microbatches": 16, "synchronous_steps": 16}, ("sgd", 4), f"_crossed_steps=1: {CROSSES}"),
    (PB, ("sgd", 2, Tied().double()), f"{ASYNCHRONOUS}one pipeline rank each, got '0.weight', which pipeline "
     "ranks 0, 1 share"),
    (PB, ("sgd", 2, with_a_half()), f"{ASYNCHRONOUS}another dtype than float16, got '3.0.weight'"),
]  # fmt: skip


@on_ranks(4)
def test_what_an_asynchronous_pipeline_cannot_train_is_refused_by_name():
    for pipeline, others, text in REFUSED:
        with pytest.raises(ValueError, match=re.escape(text)):
            begin(pipeline, *others)


class FailsAtFirst(torch.optim.SGD):
    """Micro-batches are under way then, whose messages the next list would take for its own."""

    def step(self, closure=None):
        raise LookupError("no step")


@on_ranks(2)
def test_after_a_list_that_failed_ranks_neither_compute_nor_save(tmp_path):
    """They may have taken different numbers of steps."""
    engine = begin({"schedule": "pipedream"}, lambda parameters: FailsAtFirst(parameters, lr=0.02))
    with pytest.raises(LookupError, match="no step"):
        train(engine, [0])
    batch = batch_of(0, 6)
    for name, call in {
        "train_batch()": lambda: engine.train_batch(*batch),
        "train_batches()": lambda: engine.train_batches([tuple(batch)]),
        "eval_batch()": lambda: engine.eval_batch(*batch),
        "save_checkpoint()": lambda: engine.save_checkpoint(tmp_path),
        "load_checkpoint()": lambda: engine.load_checkpoint(tmp_path),
    }.items():
        text = f"{name} after a list that ended in an exception between its actions"
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}"):
            call()


@on_ranks(2)
def test_a_checkpoint_is_loaded_under_a_list_from_a_file(tmp_path):
    """The list says whether a rank has noted the mean of its changes."""
    file = tmp_path / "own.csv"
    file.write_text(str(steady(2, 6)))
    engine = begin({"schedule": str(file), "weights": "estimate"}, "adamw")
    train(engine, [0])
    saved = state_of(engine)
    engine.save_checkpoint(tmp_path)
    train(engine, [1])
    engine.load_checkpoint(tmp_path)
    assert_same(state_of(engine), saved)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x.tanh())


class Recomputed(Plain):
    """A layer under an activation checkpoint."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.linear, x.tanh(), use_reentrant=False)


class Reading(Plain):
    """A layer that looks at its weight without a graph, as layers that log norms do."""

    def forward(self, x):
        self.linear.weight.data.norm()
        return super().forward(x)


def blocks_of(kind):
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(4))).double()


@pytest.mark.long_where(kind=[Recomputed])
@pytest.mark.parametrize(("kind", "schedule"), [(Recomputed, "pipedream"), (Reading, "spectrain")])
def test_a_forward_that_runs_again_or_reads_weights_changes_none(ranks, kind, schedule):
    cases = [(({"schedule": schedule},), {"model": blocks_of(one), "stage": 3}) for one in (kind, Plain)]
    for found, want in ranks(2, runs, *cases):
        assert found.losses == want.losses
        assert_same(found.state, want.state)


@on_ranks(2)
def test_autocast_and_hooks_of_saved_tensors_are_refused_and_training_goes_on():
    """As in a run without it, and in one whose list and weights the user has written."""
    engine = begin(PB)
    text = r"^hooks of saved tensors, as of .* pipeline\.weights='latest' has other weights in the backward"
    with pytest.raises(RuntimeError, match=text), torch.autograd.graph.save_on_cpu():
        train(engine, [0])
    engine.close(restore=False)
    found = []
    own = {"schedule": str(steady(2, 6)), "weights": "stash"}
    for number, pipeline in enumerate(({"schedule": "pipedream"}, {"schedule": "pipedream"}, own)):
        engine = begin(pipeline)
        if not number:
            text = r"^train_batch\(\) of an asynchronous pipeline inside torch.autocast"
            with pytest.raises(RuntimeError, match=text), torch.autocast("cpu", torch.bfloat16):
                train(engine, [0])
        found.append(finish(engine, train(engine, [0])))
    for other in found[1:]:
        assert found[0].losses == other.losses
        assert_same(found[0].state, other.state)


# ------------------------------------------------------------------------------------ batches in a row


@on_ranks(2)
def test_batches_that_cannot_be_taken_are_refused_and_training_goes_on():
    engine = begin({"schedule": "pipedream", "num_microbatches": 2})
    good = tuple(batch_of(0, 2))
    for batches, num, text in (
        ([], None, "train_batches(): expected at least 1 batch, got 0"),
        ([(*good, 1)], None, "batch 0: expected (inputs, targets) or the inputs alone, got a tuple of 3"),
        (iter([]), 2, "expected 2 batches, got 0"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            engine.train_batches(batches, num)
    losses = engine.train_batches([good, good]).tolist()
    assert losses[1] < losses[0]
    batches = [good, tuple(batch_of(1 + torch.distributed.get_rank(), 2))]  # the fourth batch of all
    with pytest.raises(RuntimeError, match=r"pipeline ranks \[0, 1\] have different batches"):
        engine.train_batches(batches)
    engine.close(restore=False)
    engine = begin({"schedule": str(steady(2, 2)), "num_microbatches": 2, "weights": "stash"})
    text = r"train_batches\(\) with a list of your own in pipeline.schedule: expected 1"
    with pytest.raises(ValueError, match=text):
        engine.train_batches([good, good])
    assert len(engine.train_batches([good])) == 1


# ------------------------------------------------------------------------- what cannot go on in a list


def editing(block, first, *, through_data=False):
    """Edit a bias in a forward, from a step on: the first edit is noted in another way than later ones."""

    def clamp(engine, module, _):
        if engine.global_step >= first:
            bias = module[1].bias.data if through_data else module[1].bias
            with torch.no_grad():
                bias.clamp_(-0.05, 0.05)

    def act(engine):
        if isinstance(found := engine.module[block], nn.Sequential):
            found.register_forward_pre_hook(functools.partial(clamp, engine))
        train(engine, [0])

    return act


def between(call):
    """Call something while a list loads its batches."""

    def batches(engine):
        yield tuple(batch_of(0, 6))
        call(engine)
        yield tuple(batch_of(1, 6))

    return lambda engine: engine.train_batches(batches(engine), 2)


RAGGED = [tuple(batch_of(0, 6)), tuple(batch_of(0, 3))]
DREAM, VERTICAL = {"schedule": "pipedream"}, {"schedule": "pipedream", "weights": "vertical"}
SPEC, EDITED = {"schedule": "spectrain"}, "'{}.1.bias' was edited in a forward or backward"
ENDS = {
    "ragged batches": (DREAM, 3, lambda engine: engine.train_batches(RAGGED),
     "batch 1: expected the shapes of the first batch of the list"),
    # The last pipeline rank computes with the version of the first one, which is not the newest one there.
    "edit of a version": (VERTICAL, 0, editing(3, 1), EDITED.format(3)),
    # The first pipeline rank computes with predicted weights, which are no main parameters.
    "edit through data": (SPEC, 0, editing(0, 2, through_data=True), EDITED.format(0)),
    "edit where weights are gathered": (SPEC, 3, editing(0, 0), EDITED.format(0)),
    "evaluation": (DREAM, 3, between(lambda engine: engine.eval_batch(*batch_of(0, 6))),
     "eval_batch() inside of a batch"),
    "save": (DREAM, 3, between(lambda engine: engine.save_checkpoint("nowhere")),
     "save_checkpoint() inside of a batch"),
}  # fmt: skip
"""The pipeline, the stage, a call, and the error on the rank where it comes first."""


def ended(case):
    pipeline, stage, act, _ = ENDS[case]
    engine = begin(pipeline, stage=stage, watchdog_s=0.5)
    return refused(act, engine)  # another rank waits for its watchdog


@pytest.mark.long_where(case=[case for case in ENDS if case != "ragged batches"])
@pytest.mark.parametrize("case", ENDS)
def test_habits_that_cannot_go_on_are_refused_by_name(ranks, case):
    found = ranks(2, ended, case)
    assert any(message.startswith(ENDS[case][3]) for message in found), found
