"""Code of the user in the middle of a list: it reads and edits weights, and calls the engine or autograd."""

import pytest
import torch
from torch import nn

from tests.parallel.pipeline.asynchronous.test_endings import run, script
from tests.parallel.pipeline.asynchronous.test_habits import assert_same, begin, state_of, train
from tests.parallel.pipeline.asynchronous.test_reference import WIDTH, batch_of

__all__ = ["run"]

# ------------------------------------------------------------------------------------- reads and edits


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x.tanh())


class Reading(Block):
    """A layer that looks at its weight without a graph, as layers that log norms do."""

    def forward(self, x):
        self.linear.weight.data.norm()
        return super().forward(x)


def blocks_of(kind):
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(4))).double()


def trained(kind, schedule, stage):
    engine = begin({"schedule": schedule}, model=blocks_of(kind), stage=stage)
    losses = train(engine, [0, 1])
    state = state_of(engine)
    engine.close(restore=False)
    return losses, state


@pytest.mark.long_where(schedule=["lwp", "2bw"])
@pytest.mark.long_where(stage=[1])
@pytest.mark.long_where(stage=[0], schedule=["spectrain"])
@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 0), (4, 1), (4, 3)])
@pytest.mark.parametrize("schedule", ["lwp", "spectrain", "2bw"])
def test_a_forward_that_reads_weights_changes_none(ranks, schedule, num_ranks, stage):
    want = ranks(num_ranks, trained, Block, schedule, stage)
    for found, plain in zip(ranks(num_ranks, trained, Reading, schedule, stage), want, strict=True):
        assert found[0] == plain[0]
        assert_same(found[1], plain[1])


# The first pipeline rank computes with predicted weights.
EDITS = {
    "in place": "with torch.no_grad():\n            block.linear.bias.clamp_(-0.05, 0.05)",
    "through data": "block.linear.bias.data.clamp_(-0.05, 0.05)",
}
EDIT = """
def clamp(block, _):
    if engine.global_step >= FIRST:
        EDIT
first.register_forward_pre_hook(clamp)
engine.train_batch(x, y)
"""


EDITED = "RuntimeError: '0.linear.bias' was edited in a forward or backward"


def editing(stage, how, first):
    """A script that edits from a micro-batch on: the first one is noted in another way than later ones."""
    act = EDIT.replace("EDIT", EDITS[how]).replace("FIRST", str(first))
    return script("spectrain", checkpoints=False, act=act, stage=stage)


def assert_says(endings, text):
    found = [ending.last_line for ending in endings]
    assert any(line.startswith(text) for line in found), found


@pytest.mark.long
@pytest.mark.parametrize(("stage", "num_ranks"), [(3, 4), pytest.param(0, 2, marks=pytest.mark.long)])
def test_a_forward_that_edits_weights_that_are_no_main_parameters_is_refused(run, stage, num_ranks):
    cases = [(how, first) for how in EDITS for first in (0, 2)]
    chosen = cases if num_ranks == 2 else cases[:1]
    for endings in run(*(editing(stage, *case) for case in chosen), num_ranks=num_ranks):
        assert_says(endings, EDITED)


@pytest.mark.long
@pytest.mark.parametrize("how", EDITS)
def test_edits_are_refused_where_weights_are_gathered(run, how):
    [endings] = run(editing(3, how, 2), num_ranks=4)
    assert_says(endings, EDITED)


def with_hook(schedule, through):
    """A hook of the optimizer clamps the weights behind each of its steps."""
    engine = begin({"schedule": schedule}, stage=0)

    @torch.no_grad()
    def clamp(optimizer, args, kwargs):
        if through == "the groups":
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.2, 0.2)
        else:
            for parameter in engine.module.parameters():
                parameter.data.clamp_(-0.2, 0.2)

    engine.optimizer.register_step_post_hook(clamp)
    train(engine, [0, 1])
    state = state_of(engine)
    engine.close(restore=False)
    return state


@pytest.mark.long_where(schedule=["2bw", "lwp", "pb", "pipemare", "spectrain"])
@pytest.mark.parametrize("schedule", ["pb", "pipedream", "2bw", "lwp", "pipemare", "spectrain"])
def test_a_hook_of_the_optimizer_has_the_main_parameters(ranks, schedule):
    for groups in ranks(2, with_hook, schedule, "the groups"):
        assert max(value.abs().max().item() for value in groups.values()) <= 0.2


def test_a_hook_of_the_optimizer_finds_them_in_the_model_too(ranks):
    for through_groups, through_model in zip(
        *(ranks(2, with_hook, "pipedream", through) for through in ("the groups", "the model")), strict=True
    ):
        assert through_groups.keys() == through_model.keys()
        for name, value in through_model.items():
            assert torch.equal(value, through_groups[name]), name


# ------------------------------------------------------------------------------ parameters of optimizers


def half_of(parameters):
    return torch.optim.SGD(list(parameters)[::2], lr=0.02, momentum=0.8)


def all_of(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.8)


def in_groups(schedule, adds, stage):
    engine = begin({"schedule": schedule}, half_of if adds else all_of, stage=stage)
    if adds:
        held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
        others = [p for p in engine.module.parameters() if id(p) not in held]
        engine.optimizer.add_param_group({"params": others})
    losses = train(engine, [0, 1])
    state = state_of(engine)
    engine.close(restore=False)
    return losses, state


@pytest.mark.long_where(schedule=["lwp"])
@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("schedule", ["lwp", "pipemare"])
def test_parameters_that_are_added_to_the_optimizer_are_moved_too(ranks, schedule, stage):
    want = ranks(2, in_groups, schedule, False, stage)
    for found, plain in zip(ranks(2, in_groups, schedule, True, stage), want, strict=True):
        assert found[0] == plain[0]
        assert_same(found[1], plain[1])


def states_of_half():
    engine = begin({"schedule": "pipemare"}, half_of)
    train(engine, [0, 1])
    held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    names = sorted({key for state in engine.optimizer.state.values() for key in state})
    others = [p.fqn for p in engine.optimizer.state if id(p) not in held]
    number = len(engine.optimizer.state_dict()["state"])
    engine.close(restore=False)
    return names, others, number == len(held)


def test_changes_are_noted_of_the_parameters_of_the_optimizer_alone(ranks):
    (first, last) = ranks(2, states_of_half)
    assert first == (["mean_of_changes", "momentum_buffer"], [], True)
    assert last == (["momentum_buffer"], [], True)


# ---------------------------------------------------------------------------- hooks of saved tensors

SAVED = """
from torch.autograd.graph import saved_tensors_hooks
class Copying(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(20, 20)
    def forward(self, x):
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return self.linear(x.tanh())
torch.manual_seed(0)
model = nn.Sequential(*(Copying() for _ in range(4)))
engine = zeroshard.initialize(model, torch.optim.AdamW, config, loss_fn=nn.functional.mse_loss).engine
engine.train_batch(x, y)
"""


# ------------------------------------------------------------------------------- calls of the engine

CALLS = {
    "eval_batch()": "engine.eval_batch(x, y)",
    "train_batch()": "engine.train_batch(x, y)",
    "save_checkpoint()": "engine.save_checkpoint('nowhere')",
    "load_checkpoint()": "engine.load_checkpoint('nowhere')",
    "unsharded()": "engine.unsharded().__enter__()",
}
BETWEEN = """
def batches():
    yield x, y
    CALL
    yield x, y
engine.train_batches(batches(), 2)
"""


RAGGED = """
engine.train_batches([(x, y), (x[:8], y[:8])])
"""


def test_habits_that_cannot_go_on_are_refused_by_name(run):
    """At once: the other rank of each run waits for its watchdog."""
    acts = {
        "edit": editing(0, "through data", 2),
        "hooks, pb": script("pb", checkpoints=False, act=SAVED),
        "ragged": script("pipedream", checkpoints=False, act=RAGGED),
        "save": calling("save_checkpoint()"),
    }
    found = dict(zip(acts, run(*acts.values()), strict=True))
    assert_says(found["edit"], EDITED)
    assert_says(
        found["hooks, pb"],
        "RuntimeError: hooks of saved tensors, such as save_on_cpu, give the backward a copy of 'weight' of "
        "Linear from its forward, where pipeline.weights='latest' has other weights",
    )
    assert_says(found["ragged"], "ValueError: batch 1: expected the shapes")
    assert any(one.last_line.endswith("(drop_last=True of a DataLoader)") for one in found["ragged"])
    assert_says(found["save"], "RuntimeError: save_checkpoint() inside of a batch")


@pytest.mark.long
def test_hooks_of_saved_tensors_are_right_where_a_backward_has_the_weights_of_its_forward(run):
    [endings] = run(script("pipedream", checkpoints=False, act=SAVED))
    assert [ending.code for ending in endings] == [0, 0]


def calling(call):
    return script("pipedream", checkpoints=False, act=BETWEEN.replace("CALL", CALLS[call]))


@pytest.mark.long
def test_calls_in_the_middle_of_a_list_are_refused(run):
    for call, endings in zip(CALLS, run(*map(calling, CALLS)), strict=True):
        assert_says(endings, f"RuntimeError: {call} inside of a batch")


class FailsAtTheThird(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.02)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == 3:
            raise LookupError("no step")
        super().step(closure)


def calls_after_a_failure(folder):
    engine = begin({"schedule": "pipedream"}, FailsAtTheThird)
    with pytest.raises(LookupError, match="no step"):
        train(engine, [0])
    found, batch = {}, [value.double() for value in batch_of(0, 6)]
    calls = {
        "train_batch()": lambda: engine.train_batch(*batch),
        "train_batches()": lambda: engine.train_batches([tuple(batch)]),
        "eval_batch()": lambda: engine.eval_batch(*batch),
        "save_checkpoint()": lambda: engine.save_checkpoint(folder),
        "load_checkpoint()": lambda: engine.load_checkpoint(folder),
    }
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            found[name] = str(error)
    return found


def test_after_a_list_that_failed_ranks_neither_compute_nor_save(ranks, tmp_path):
    """They may have taken different numbers of steps."""
    for found in ranks(2, calls_after_a_failure, tmp_path):
        assert len(found) == 5
        for call, message in found.items():
            assert message.startswith(f"{call} after a list that ended in an exception between its actions")
