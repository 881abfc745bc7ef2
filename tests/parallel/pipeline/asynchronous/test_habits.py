"""Asynchronous pipelines together with what users do: checkpoints, evaluation, schedules, dtypes, errors.

Lists of any length, evaluation and schedules of the learning rate are in `test_reference.py`.
"""

import pytest
import torch
from torch import nn

from tests.checkpoint.runs import without_numba
from tests.parallel.pipeline.asynchronous.runs import (
    MAKERS,
    WIDTH,
    assert_same,
    batch_of,
    begin,
    finish,
    method_of,
    model_of,
    runs,
    train,
)
from zeroshard.parallel.pipeline.schedules import steady

# ---------------------------------------------------------------------------------- dtypes and layouts

NARROW = {"param_dtype": "bf16", "main_dtype": "fp32"}


@without_numba
def runs_by_torch(*cases):
    return runs(*cases)


@pytest.mark.parametrize(
    ("maker", "name"),
    [
        ("adamw 8-bit", "pipedream"),
        pytest.param("adamw", "pipemare", marks=pytest.mark.long),
    ],
)
def test_8_bit_states_and_bfloat16_give_the_same_bits_at_all_stages_and_in_shard_groups(ranks, maker, name):
    """Two data-parallel ranks; the sums of two gradients have one order."""
    arguments, options = (method_of(name, 2)[0], maker), {}
    if maker == "adamw":
        options = {"model": model_of(2).float(), "precision": NARROW}
    layouts = [{"stage": stage} for stage in (0, 1, 3)]
    layouts += [{"stage": 3, "shard_group_size": 1}] * (maker == "adamw")
    of_layouts = ((arguments, options | layout) for layout in layouts)
    for want, *others in ranks(4, runs_by_torch, *of_layouts):
        for layout, found in zip(layouts[1:], others, strict=True):
            assert found.losses == want.losses, layout
            assert_same(found.state, want.state, layout)


KEPT = [
    ({"schedule": "pb"}, [0, 0, 0, 0]),
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
    of_all = [((pipeline, "adamw", 4, (0,), 12, model), {"stage": 0}) for pipeline, _ in KEPT]
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


def refusals(cases):
    messages = []
    for pipeline, others in cases:
        with pytest.raises(ValueError, match=r".") as caught:
            begin(pipeline, *others)
        messages.append(str(caught.value))
    return messages


def test_what_an_asynchronous_pipeline_cannot_train_is_refused_by_name(ranks):
    for messages in ranks(4, refusals, [case[:2] for case in REFUSED]):
        for message, (*_, text) in zip(messages, REFUSED, strict=True):
            assert text in message


class FailsAtFirst(torch.optim.SGD):
    """Micro-batches are under way then, whose messages the next list would take for its own."""

    def step(self, closure=None):
        raise LookupError("no step")


def calls_after_a_failure(folder):
    engine = begin({"schedule": "pipedream"}, lambda parameters: FailsAtFirst(parameters, lr=0.02))
    with pytest.raises(LookupError, match="no step"):
        train(engine, [0])
    batch = batch_of(0, 6)
    calls = {
        "train_batch()": lambda: engine.train_batch(*batch),
        "train_batches()": lambda: engine.train_batches([tuple(batch)]),
        "eval_batch()": lambda: engine.eval_batch(*batch),
        "save_checkpoint()": lambda: engine.save_checkpoint(folder),
        "load_checkpoint()": lambda: engine.load_checkpoint(folder),
    }
    for name, call in calls.items():
        text = "after a list that ended in an exception between its actions"
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value).startswith(f"{name} {text}")


def test_after_a_list_that_failed_ranks_neither_compute_nor_save(ranks, tmp_path):
    """They may have taken different numbers of steps."""
    ranks(2, calls_after_a_failure, tmp_path)


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


@pytest.mark.parametrize(
    ("kind", "num_ranks", "schedule"), [(Recomputed, 2, "pipedream"), (Reading, 4, "spectrain")]
)
def test_a_forward_that_runs_again_or_reads_weights_changes_none(ranks, kind, num_ranks, schedule):
    cases = [(({"schedule": schedule},), {"model": blocks_of(one), "stage": 3}) for one in (kind, Plain)]
    for found, want in ranks(num_ranks, runs, *cases):
        assert found.losses == want.losses
        assert_same(found.state, want.state)


def autocast():
    engine = begin({"schedule": "pipedream"})
    text = r"^train_batch\(\) of an asynchronous pipeline inside torch.autocast"
    with pytest.raises(RuntimeError, match=text), torch.autocast("cpu", torch.bfloat16):
        train(engine, [0])
    return finish(engine, train(engine, [0]))


def test_autocast_is_refused_and_training_goes_on(ranks):
    """As in a run without it, and in one whose list and weights the user has written."""
    own = {"schedule": str(steady(2, 6)), "weights": "stash"}
    cases = [((pipeline,), {"numbers": (0,)}) for pipeline in ({"schedule": "pipedream"}, own)]
    for found, others in zip(ranks(2, autocast), ranks(2, runs, *cases), strict=True):
        for other in others:
            assert found.losses == other.losses
            assert_same(found.state, other.state)


def with_a_group_more(schedule):
    """Half of the parameters are given to the optimizer later."""
    engine = begin({"schedule": schedule}, lambda parameters: MAKERS["sgd"](list(parameters)[::2]), stage=0)
    held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    others = [p for p in engine.module.parameters() if id(p) not in held]
    engine.optimizer.add_param_group({"params": others})
    return finish(engine, train(engine, [0, 1]))


@pytest.mark.parametrize("schedule", ["pipemare", "lwp"])
def test_parameters_that_are_added_to_the_optimizer_are_moved_too(ranks, schedule):
    plain = ({"schedule": schedule},), {"stage": 0}
    for found, (want,) in zip(ranks(2, with_a_group_more, schedule), ranks(2, runs, plain), strict=True):
        assert found.losses == want.losses
        assert_same(found.state, want.state)


# ------------------------------------------------------------------------------------ batches in a row


def wrong_batches():
    engine = begin({"schedule": "pipedream", "num_microbatches": 2})
    good, messages = tuple(batch_of(0, 2)), []
    for batches, num in [([], None), ([(*good, 1)], None), (iter([]), 2)]:
        with pytest.raises(ValueError, match=r".") as caught:
            engine.train_batches(batches, num)
        messages.append(str(caught.value))
    losses = engine.train_batches([good, good]).tolist()
    assert losses[1] < losses[0]
    engine.close(restore=False)
    engine = begin({"schedule": str(steady(2, 2)), "num_microbatches": 2, "weights": "stash"})
    text = r"train_batches\(\) with a list of your own in pipeline.schedule: expected 1"
    with pytest.raises(ValueError, match=text):
        engine.train_batches([good, good])
    assert len(engine.train_batches([good])) == 1
    engine.close(restore=False)
    return messages


def test_batches_that_cannot_be_taken_are_refused_and_training_goes_on(ranks):
    for messages in ranks(2, wrong_batches):
        assert messages == [
            "train_batches(): expected at least 1 batch, got 0",
            "batch 0: expected (inputs, targets) or the inputs alone, got a tuple of 3; put several inputs "
            "into a tuple or a mapping of their own",
            "expected 2 batches, got 0",
        ]


def other_batches():
    engine = begin({"schedule": "pipedream", "num_microbatches": 2})
    batches = [tuple(batch_of(number, 2)) for number in (0, 1, 2, 3 + torch.distributed.get_rank())]
    with pytest.raises(RuntimeError, match=r"pipeline ranks \[0, 1\] have different batches"):
        engine.train_batches(batches)


def test_later_batches_that_differ_between_pipeline_ranks_are_noticed(ranks):
    ranks(2, other_batches)


# ------------------------------------------------------------------------------------ changes in checkpoints


def changes_at(folder, num_stages, tag, number):
    """Train from a checkpoint and save; the parameters whose last change is noted before and after."""
    engine = begin({"schedule": "lwp", "weights": "lwp-weights"}, num_stages=num_stages, model=model_of(4))
    found = []
    if tag is not None:
        engine.load_checkpoint(folder, tag)
    for last in (False, True):
        noted = (p.fqn for p, state in engine.optimizer.state.items() if "last_change" in state)
        found.append(sorted(noted))
        if not last:
            train(engine, [number])
    engine.save_checkpoint(folder, str(number))
    engine.close(restore=False)
    return found


@pytest.mark.long
def test_a_rank_that_crosses_no_step_takes_no_change_from_a_checkpoint(ranks, tmp_path):
    """Else it would save it again, unchanged, for a run that crosses steps there."""
    ranks(4, changes_at, str(tmp_path), 4, None, 0)
    (_, first), last = ranks(2, changes_at, str(tmp_path), 2, "0", 1)
    assert first
    assert last == [[], []]
    found = ranks(4, changes_at, str(tmp_path), 4, "1", 2)
    assert [[bool(names) for names in own] for own in found] == [[True, True]] * 2 + [
        [False, True],
        [False, False],
    ]
