"""Asynchronous pipelines together with what users do: checkpoints, evaluation, schedules, dtypes, errors.

Tolerances are those of `test_reference.py` where the same computation is compared with one process.
"""

import pytest
import torch
from torch import nn

import zeroshard
from tests.parallel.pipeline.asynchronous import reference
from tests.parallel.pipeline.asynchronous.test_reference import (
    MAKERS,
    METHODS,
    WIDTH,
    adamw,
    batch_of,
    compare,
    expected,
    model_of,
    over_ranks,
    sgd,
)
from zeroshard.optim import AdamW8bit, SGD8bit
from zeroshard.parallel.pipeline.schedules import steady


def adamw_8bit(parameters):
    return AdamW8bit(parameters, lr=3e-3, min_8bit_size=0)


def sgd_8bit(parameters):
    return SGD8bit(parameters, lr=0.02, momentum=0.8, min_8bit_size=0)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


MEAN, LAST = "mean_of_changes", "last_change"
EVERY = MAKERS | {"adamw 8-bit": adamw_8bit, "sgd 8-bit": sgd_8bit, "plain sgd": plain_sgd}


def square_loss(output, target):
    """mse_loss of torch 2.11 has no backward for operands of two dtypes."""
    return (output.float() - target).square().mean()


def begin(pipeline, maker="sgd", num_stages=2, model=None, loss_fn=nn.functional.mse_loss, **config):
    balance = {} if "split" in pipeline else {"balance": "memory"}
    pipeline = {"num_microbatches": 6, **balance, **pipeline}
    config = {"mesh": {"pp": num_stages}, "pipeline": pipeline, **config}
    model = model_of(num_stages) if model is None else model
    make = EVERY[maker] if isinstance(maker, str) else maker
    return zeroshard.initialize(model, make, config, loss_fn=loss_fn).engine


def train(engine, numbers, num=6, dtype=torch.float64):
    losses = []
    for number in numbers:
        own = [
            torch.cat([one.chunk(engine.dp_world_size)[engine.dp_rank] for one in value.to(dtype).chunk(num)])
            for value in batch_of(number, num)
        ]
        losses.append(engine.train_batch(*own).item())
    return losses


def state_of(engine):
    with engine.unsharded():
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def assert_same(found, want):
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(value, found[name]), name


# ------------------------------------------------------------------------------------ lists in a row


@pytest.mark.long_where(name=["lwp, spike", "2bw", "spectrain"])
@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["pipemare", "spectrain", "2bw", "lwp, spike"])
def test_a_pipeline_drains_at_the_end_of_each_list(ranks, name, stage):
    """The last step of a list takes the micro-batches that are left over, 1 of 7 at 2 a step."""
    pipeline, method, k, maker = METHODS[name]
    k = k or 2
    found = ranks(2, over_ranks, 2, pipeline, maker, stage, (0, 1, 2), 7)
    compare(found, expected(2, method, k, maker, (0, 1, 2), 7))


LENGTHS = (5, 1, 7)


def of_lengths(pipeline, maker):
    engine = begin(pipeline, maker, 3, stage=3)
    losses = []
    for number, length in enumerate(LENGTHS):
        engine.set_gradient_accumulation_steps(length)
        losses += train(engine, [number], length)
    state, steps = state_of(engine), engine.global_step
    engine.close(restore=False)
    return losses, state, steps


@pytest.mark.long_where(name=["lwp-weights"])
@pytest.mark.parametrize("name", ["pipemare", "lwp-weights"])
def test_changes_are_noted_at_each_step_of_lists_of_any_length(ranks, name):
    """In a list of one micro-batch nothing is late, and its step belongs to the changes all the same."""
    pipeline, method, k, maker = METHODS[name]
    model = model_of(3)
    stages = [reference.Stage(list(model)[2 * s : 2 * s + 2], MAKERS[maker]) for s in range(3)]
    losses, taken = [], 0
    for number, length in enumerate(LENGTHS):
        batch = list(zip(*(value.chunk(length) for value in batch_of(number, length)), strict=True))
        found = reference.train(stages, batch, nn.functional.mse_loss, k, method | {"taken": taken})
        losses.append(sum(found) / length)
        taken += length
    compare(ranks(3, of_lengths, pipeline, maker), (losses, dict(model.named_parameters()), taken))


@pytest.mark.long_where(num_stages=[4])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_2bw_is_descent_that_is_one_step_late_at_any_depth(ranks, num_stages):
    """Narayanan et al. 2021, section 3.1: W(t+1) = W(t) - lr * grad f(W(t-1)); here with momentum.

    The gradients of plain PyTorch over the whole model and the 4 micro-batches of a step at once: 1e-12.
    """
    num_steps, pipeline = 6, {"schedule": "2bw", "microbatches_per_step": 4}
    found = ranks(num_stages, over_ranks, num_stages, pipeline, "sgd", 3, (0,), 4 * num_steps)
    model = model_of(num_stages)
    optimizer = sgd(list(model.parameters()))
    inputs, targets = batch_of(0, 4 * num_steps)
    before = [p.detach().clone() for p in model.parameters()]
    for x, y in zip(inputs.chunk(num_steps), targets.chunk(num_steps), strict=True):
        now = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        put(model, before)
        nn.functional.mse_loss(model(x), y).backward()
        put(model, now)
        optimizer.step()
        before = now
    want = dict(model.named_parameters())
    for _, state, steps in found:
        assert steps == num_steps
        for name, value in state.items():
            torch.testing.assert_close(value, want[name].detach(), rtol=0, atol=1e-12, msg=name)


def put(model, values):
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.copy_(value)


def synchronous(schedule, stage):
    """An asynchronous schedule whose steps are all synchronous, and 1F1B step by step."""
    engine = begin({"schedule": schedule, "microbatches_per_step": 3, "synchronous_steps": 4}, stage=stage)
    train(engine, [0, 1])
    found, steps = state_of(engine), engine.global_step
    engine.close(restore=False)
    other = begin({"schedule": "1f1b", "num_microbatches": 3}, stage=stage)
    for number in (0, 1):
        for pieces in zip(*(value.chunk(2) for value in batch_of(number, 6)), strict=True):
            other.train_batch(*pieces)
    want = state_of(other)
    other.close(restore=False)
    return found, want, steps


@pytest.mark.long_where(stage=[0])
@pytest.mark.long_where(schedule=["pb"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("schedule", ["pb", "pipedream", "spectrain"])
def test_synchronous_steps_are_those_of_1f1b(ranks, schedule, stage):
    """The loss is divided by 3 before the backward, or its gradients after it: 1e-12."""
    for found, want, steps in ranks(2, synchronous, schedule, stage):
        assert steps == 4
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


def own_list(text):
    engine = begin({"schedule": text, "weights": "stash"})
    train(engine, [0, 1])
    found = state_of(engine)
    engine.close(restore=False)
    other = begin({"schedule": "pipedream"})
    train(other, [0, 1])
    want = state_of(other)
    other.close(restore=False)
    return found, want


def test_a_list_of_the_user_trains_with_the_weights_that_he_names(ranks):
    for found, want in ranks(2, own_list, str(steady(2, 6))):
        assert_same(found, want)


# --------------------------------------------------------------------------------------- checkpoints


def noted_changes(engine):
    """The states that the pipeline adds to those of the optimizer, by parameter and name."""
    return {
        (parameter.fqn, key): value.clone()
        for parameter, state in engine.optimizer.state.items()
        for key, value in state.items()
        if key in (MEAN, LAST)
    }


def saved(folder, pipeline, maker, stage):
    engine = begin(pipeline, maker, stage=stage)
    train(engine, [0, 1])
    engine.save_checkpoint(folder, "here")
    train(engine, [2, 3])
    state = state_of(engine)
    noted = noted_changes(engine)
    engine.close(restore=False)
    return state, noted


def resumed(folder, pipeline, maker, stage):
    model = model_of(2)
    for parameter in model.parameters():
        parameter.data.zero_()
    engine = begin(pipeline, maker, stage=stage, model=model)
    engine.load_checkpoint(folder, "here")
    train(engine, [2, 3])
    state, noted, steps = state_of(engine), noted_changes(engine), engine.global_step
    engine.close(restore=False)
    return state, noted, steps


@pytest.mark.long_where(stage=[0])
@pytest.mark.long_where(maker=["adamw", "adamw 8-bit", "plain sgd", "sgd 8-bit"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("pipeline", "maker", "extra"),
    [
        ({"schedule": "pipemare", "anneal_steps": 15, "synchronous_steps": 2}, "sgd", {MEAN}),
        ({"schedule": "pipemare"}, "adamw 8-bit", {MEAN}),
        ({"schedule": "lwp", "weights": "lwp-weights"}, "adamw", {LAST}),
        ({"schedule": "pb", "weights": "estimate"}, "plain sgd", {MEAN}),
        ({"schedule": "spectrain"}, "adamw", set()),
        ({"schedule": "spectrain"}, "sgd 8-bit", set()),
        ({"schedule": "pipedream"}, "adamw 8-bit", set()),
    ],
)
def test_resuming_equals_a_run_that_drained_at_the_same_step(ranks, tmp_path, pipeline, maker, extra, stage):
    """To the bit: the state of the versions that matters is in the checkpoint."""
    want = ranks(4, saved, str(tmp_path), pipeline, maker, stage)
    found = ranks(4, resumed, str(tmp_path), pipeline, maker, stage)
    for rank, ((state, noted), (other, others, steps)) in enumerate(zip(want, found, strict=True)):
        assert {key for _, key in noted} == (extra if rank < 2 else set())  # the last stage crosses no step
        assert steps == 24
        assert_same(other, state)
        assert_same(others, noted)
        assert all(value.dtype == others[key].dtype for key, value in noted.items())


def begun_at(folder, num_stages, tag, numbers, new_tag):
    """Train from a checkpoint; return the noted changes before and after."""
    engine = begin({"schedule": "lwp", "weights": "lwp-weights"}, num_stages=num_stages, model=model_of(4))
    if tag:
        engine.load_checkpoint(folder, tag)
    before = noted_changes(engine)
    train(engine, numbers)
    engine.save_checkpoint(folder, new_tag)
    after = noted_changes(engine)
    engine.close(restore=False)
    return before, after


def test_a_rank_that_crosses_no_step_takes_no_change_from_a_checkpoint(ranks, tmp_path):
    """Else it would save it again, unchanged, for a run that crosses steps there."""
    ranks(4, begun_at, str(tmp_path), 4, "", [0], "four")
    (_, first), (before, last) = ranks(2, begun_at, str(tmp_path), 2, "four", [1], "two")
    assert {key for _, key in first} == {LAST}
    assert before == last == {}
    for rank, (before, after) in enumerate(ranks(4, begun_at, str(tmp_path), 4, "two", [2], "again")):
        assert (before != {}) is (rank < 2)
        assert (after != {}) is (rank < 3)


# -------------------------------------------------------------------------------------- 8-bit states


def eight_bit(pipeline, maker, stage):
    engine = begin(pipeline, maker, stage=stage)
    losses = train(engine, [0, 1, 2])
    state = state_of(engine)
    engine.close(restore=False)
    return losses, state


@pytest.mark.long_where(name=["pipemare", "spectrain", "lwp", "2bw", "pb"])
@pytest.mark.long_where(maker=["sgd 8-bit"], name=["pipedream"])
@pytest.mark.parametrize("name", ["pipedream", "spectrain", "lwp", "pipemare", "2bw", "pb"])
@pytest.mark.parametrize("maker", ["adamw 8-bit", "sgd 8-bit"])
def test_8_bit_states_give_the_same_bits_at_all_stages(ranks, name, maker):
    """Two data-parallel ranks; the sums of two gradients have one order."""
    want = ranks(4, eight_bit, {"schedule": name}, maker, 0)
    for stage in (1, 2, 3):
        found = ranks(4, eight_bit, {"schedule": name}, maker, stage)
        for (losses, state), (others, expected_state) in zip(found, want, strict=True):
            assert losses == others
            assert_same(state, expected_state)


# ---------------------------------------------------------------------------------- dtypes and layouts


def in_bfloat16(name, stage, group=None):
    config = {"stage": stage, "precision": {"param_dtype": "bf16", "main_dtype": "fp32"}}
    if group is not None:
        config["shard_group_size"] = group
    pipeline = {"schedule": "pipedream", "weights": name} if name == "vertical" else {"schedule": name}
    engine = begin(pipeline, "adamw", model=model_of(2).float(), loss_fn=square_loss, **config)
    engine.reset_memory_report()
    losses = train(engine, [0], dtype=torch.float32)
    state, report = state_of(engine), engine.memory_report()
    size = sum(buffer.main.numel() for buffer in engine._runtime.buffers)
    engine.close(restore=False)
    return losses, state, report.peak_versions, size


@pytest.mark.long_where(name=["pipemare", "vertical", "2bw", "pb"])
@pytest.mark.parametrize("name", ["pipedream", "vertical", "2bw", "pipemare", "pb"])
def test_bfloat16_gives_the_same_bits_at_all_stages_and_in_shard_groups(ranks, name):
    want = ranks(4, in_bfloat16, name, 0)
    for stage, group in [(1, None), (2, None), (3, None), (3, 1), (2, 1)]:
        for (loss, state, *_), (other, expected_state, *_) in zip(
            ranks(4, in_bfloat16, name, stage, group), want, strict=True
        ):
            assert loss == other
            assert_same(state, expected_state)


@pytest.mark.long_where(stage=[1])
@pytest.mark.parametrize(("stage", "num_parts"), [(0, 1), (1, 2), (3, 2)])
def test_a_version_is_kept_as_the_shard_of_this_rank_in_the_compute_dtype(ranks, stage, num_parts):
    """PipeDream keeps p - s versions at stage s, one of which is the newest: at p = 2, one more or none."""
    for rank, (_, _, peak, size) in enumerate(ranks(4, in_bfloat16, "pipedream", stage)):
        assert size * num_parts == 3072  # 12 parameters, each padded to blocks of 256
        assert peak == (2 * size if rank < 2 else 0)


def memory_of_versions(pipeline, stage):
    model = model_of(4).float()
    engine = begin(
        {**pipeline, "num_microbatches": 12}, "adamw", 4, model=model, loss_fn=square_loss, stage=stage
    )
    engine.reset_memory_report()
    inputs, targets = (value.float() for value in batch_of(0, 12))
    engine.train_batch(inputs, targets)
    report = engine.memory_report()
    size = 4 * sum(buffer.main.numel() for buffer in engine._runtime.buffers)
    engine.close(restore=False)
    return report.peak_versions, size


KEPT = [
    ({"schedule": "pb"}, [0, 0, 0, 0]),
    ({"schedule": "pipedream"}, [3, 2, 1, 0]),
    ({"schedule": "pipedream", "weights": "vertical"}, [3, 3, 3, 3]),
    ({"schedule": "2bw"}, [1, 1, 1, 1]),
]
COPIED = [1, 1, 1, 0]
"""Not versions: the copy in which weights are moved where they are shown. The last rank crosses no step."""


@pytest.mark.long_where(pipeline=[{"schedule": "pb"}, {"schedule": "pipedream", "weights": "vertical"}])
@pytest.mark.parametrize(
    ("pipeline", "stage", "versions"),
    [
        *((pipeline, 0, versions) for pipeline, versions in KEPT),
        *(pytest.param(pipeline, 3, versions, marks=pytest.mark.long) for pipeline, versions in KEPT),
        ({"schedule": "pipemare"}, 0, COPIED),
        ({"schedule": "pipemare"}, 3, [0, 0, 0, 0]),
        pytest.param({"schedule": "spectrain"}, 3, [0, 0, 0, 0], marks=pytest.mark.long),
        pytest.param({"schedule": "lwp"}, 3, [0, 0, 0, 0], marks=pytest.mark.long),
    ],
)
def test_the_memory_of_versions_is_that_of_the_papers(ranks, pipeline, stage, versions):
    """4 pipeline ranks with one data-parallel rank: versions beside the newest one, in its dtype.

    Narayanan et al. 2019, section 3.3, and 2021, section 3.1; Yang et al. 2021, section 3.2.
    """
    found = ranks(4, memory_of_versions, pipeline, stage)
    assert [peak / size for peak, size in found] == versions


@pytest.mark.long_where(stage=[0], name=["pipedream"])
@pytest.mark.long_where(stage=[0], name=["2bw", "spectrain", "pipemare"])
@pytest.mark.long_where(name=["2bw", "pipemare"])
@pytest.mark.long_where(stage=[1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["pipedream", "2bw", "spectrain", "pipemare"])
def test_an_estimate_of_versions_is_what_is_measured(ranks, name, stage):
    pipeline = {"schedule": name, "num_microbatches": 6, "balance": "memory"}
    precision = {"param_dtype": "bf16", "main_dtype": "fp32"}
    config = {"stage": stage, "mesh": {"pp": 2}, "pipeline": pipeline, "precision": precision}
    estimate = zeroshard.estimate(model_of(2).float(), 4, config)
    measured = [peak for _, _, peak, _ in ranks(4, in_bfloat16, name, stage)]
    assert estimate.peak_versions == max(measured)


# ---------------------------------------------------------------------- evaluation, schedules, averages


def evaluated(schedule):
    engine = begin({"schedule": schedule}, stage=3)
    train(engine, [0])
    inputs, targets = batch_of(1, 6)
    loss = engine.eval_batch(inputs, targets).item()
    again = engine.eval_batch(inputs, targets).item()
    state = state_of(engine)
    engine.close(restore=False)
    return loss, again, state


@pytest.mark.long_where(schedule=["pb", "pipemare"])
@pytest.mark.parametrize("schedule", ["pipedream", "spectrain", "pipemare", "pb"])
def test_evaluation_has_the_newest_weights(ranks, schedule):
    found = ranks(2, evaluated, schedule)
    model = model_of(2)
    model.load_state_dict({name: value for _, _, state in found for name, value in state.items()})
    inputs, targets = batch_of(1, 6)
    want = nn.functional.mse_loss(model(inputs), targets).item()
    for loss, again, _ in found:
        assert loss == again == pytest.approx(want, rel=1e-6)


def scheduled():
    def halving(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    pipeline = {"schedule": "pipemare", "num_microbatches": 5, "balance": "memory"}
    config = {"mesh": {"pp": 2}, "pipeline": pipeline}
    loss_fn = nn.functional.mse_loss
    given = zeroshard.initialize(model_of(2), adamw, config, lr_scheduler=halving, loss_fn=loss_fn)
    train(given.engine, [0, 1], 5)
    return given.lr_scheduler.get_last_lr(), given.engine.global_step


def test_every_step_of_a_list_moves_the_schedule_of_the_learning_rate(ranks):
    for rates, steps in ranks(2, scheduled):
        assert rates == [3e-3 / 2**10]
        assert steps == 10


def averaged(schedule):
    engine = begin({"schedule": schedule}, stage=3)
    averages = zeroshard.EMA(engine, decay=0.5)
    train(engine, [0])
    with averages.applied():
        state = state_of(engine)
    engine.close(restore=False)
    return state


def test_averages_follow_every_step_of_a_list(ranks):
    model = model_of(2)
    stages = [reference.Stage(list(model)[2 * s : 2 * s + 2], sgd) for s in range(2)]
    batch = list(zip(*(value.chunk(6) for value in batch_of(0, 6)), strict=True))
    reference.train(stages, batch, nn.functional.mse_loss, 1, {"weights": "stash"})
    for stage, found in zip(stages, ranks(2, averaged, "pipedream"), strict=True):
        assert len(stage.history) == 7
        want = stage.history[1]["w"]  # the first update copies
        for version in stage.history[2:]:
            want = [0.5 * a + 0.5 * w for a, w in zip(want, version["w"], strict=True)]
        for (name, value), average in zip(found.items(), want, strict=True):
            torch.testing.assert_close(value, average, rtol=0, atol=1e-12, msg=name)


def frozen_part(schedule):
    model = model_of(2)
    for parameter in model[:2].parameters():
        parameter.requires_grad_(False)
    engine = begin({"schedule": schedule, "split": ["2"]}, "adamw", model=model)
    losses = train(engine, [0, 1])
    state, steps = state_of(engine), engine.global_step
    engine.close(restore=False)
    return losses, state, steps


@pytest.mark.long_where(schedule=["lwp", "pipedream"])
@pytest.mark.parametrize("schedule", ["pipedream", "pipemare", "lwp"])
def test_a_rank_whose_parameters_are_all_frozen_takes_part(ranks, schedule):
    (losses, first, steps), (others, second, other_steps) = ranks(2, frozen_part, schedule)
    assert losses == others
    assert steps == other_steps == 12
    start = dict(model_of(2).named_parameters())
    for name, value in first.items():
        assert torch.equal(value, start[name]), name
    assert any(not torch.equal(value, start[name]) for name, value in second.items())


# ---------------------------------------------------------------------------------------------- errors


def refused(pipeline, maker="sgd", num_stages=2, model=None):
    try:
        begin(pipeline, maker, num_stages, model)
    except ValueError as error:
        return str(error)
    return ""


def lion(parameters):
    return zeroshard.optim.Lion8bit(parameters, lr=1e-3)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def heavy(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=1.0)


class FailsAtFirst(torch.optim.SGD):
    """An optimizer whose first step fails, on every rank."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == 1:
            raise LookupError("no step")
        return super().step(closure)


def fails_at_first(parameters):
    return FailsAtFirst(parameters, lr=0.1)


EVERY |= {"lion": lion, "nesterov": nesterov, "heavy": heavy, "fails at first": fails_at_first}


@pytest.mark.parametrize(
    ("pipeline", "maker", "message"),
    [
        ({"schedule": "spectrain"}, "lion", "pipeline.weights='predict' moves weights along the next update"),
        (
            {"schedule": "lwp"},
            "plain sgd",
            "weights='lwp' with SGD: momentum: expected a number above 0, got 0",
        ),
        ({"schedule": "lwp"}, "nesterov", "weights='lwp' with SGD: nesterov: expected False, got True"),
        ({"schedule": "pb", "correction": "spike"}, "adamw", "expected torch.optim.SGD with momentum"),
        (
            {"schedule": "pb", "correction": "spike"},
            "heavy",
            "SGD: momentum: expected a number above 0 and below 1",
        ),
    ],
)
def test_a_method_that_does_not_go_with_the_optimizer_is_refused_by_name(ranks, pipeline, maker, message):
    for found in ranks(2, refused, pipeline, maker):
        assert message in found


def test_a_bound_that_is_not_kept_is_refused_with_its_number(ranks):
    pipeline = {"schedule": "paci", "microbatches_per_step": 1, "max_crossed_steps": 2}
    for found in ranks(4, refused, pipeline, "sgd", 4):
        assert found.startswith(
            "pipeline.max_crossed_steps=2: a micro-batch crosses 3 steps between its forward and its backward"
        )


class Tied(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self[3].weight = self[0].weight


def test_weights_that_several_stages_share_are_refused(ranks):
    for found in ranks(2, refused, {"schedule": "pipedream"}, "sgd", 2, Tied().double()):
        assert found.startswith(
            "an asynchronous pipeline: expected parameters of one pipeline rank each, got '0.weight', which "
            "pipeline ranks 0, 1 share"
        )


class Failing(torch.optim.lr_scheduler.LRScheduler):
    """A schedule of the learning rate that fails at its second step, on every rank behind the same step."""

    calls = 0

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch=None):
        self.calls += 1
        if self.calls == 3:  # torch makes the first one
            raise LookupError("no rate for this step")
        super().step()


def errors_of_two_batches(engine):
    messages = []
    for _ in range(2):
        try:
            train(engine, [0])
        except (LookupError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def interrupted():
    pipeline = {"schedule": "pipedream", "num_microbatches": 6, "balance": "memory"}
    config = {"mesh": {"pp": 2}, "pipeline": pipeline}
    loss_fn = nn.functional.mse_loss
    engine = zeroshard.initialize(model_of(2), sgd, config, lr_scheduler=Failing, loss_fn=loss_fn).engine
    return errors_of_two_batches(engine)


def test_after_an_exception_between_steps_training_cannot_go_on(ranks):
    for first, second in ranks(2, interrupted):
        assert first == "no rate for this step"
        assert second.startswith("train_batch() after a list that ended in an exception between its actions")


def interrupted_at_first():
    return errors_of_two_batches(begin({"schedule": "pipedream"}, "fails at first"))


def test_after_an_exception_in_the_first_step_training_cannot_go_on(ranks):
    """Micro-batches are under way then, whose messages the next list would take for its own."""
    for first, second in ranks(2, interrupted_at_first):
        assert first == "no step"
        assert second.startswith("train_batch() after a list that ended in an exception between its actions")


def test_a_model_in_float16_is_refused_on_all_ranks(ranks):
    model = model_of(2).float()
    model[3].half()
    for found in ranks(2, refused, {"schedule": "pb"}, "sgd", 2, model):
        assert found.startswith(
            "an asynchronous pipeline: expected parameters of another dtype than float16, got '3.0.weight'"
        )


@pytest.mark.parametrize("more", [{"num_microbatches": 2}, {"num_microbatches": 16, "synchronous_steps": 16}])
def test_a_bound_of_crossed_steps_is_checked_for_a_full_pipeline_at_once(ranks, more):
    """Lists that are short or synchronous cross fewer steps than those that follow them."""
    pipeline = {"schedule": "paci", "microbatches_per_step": 1, **more}
    for found in ranks(4, refused, pipeline, "sgd", 4):
        assert found.startswith("pipeline.max_crossed_steps=1: a micro-batch crosses 3 steps")


class Recomputed(nn.Module):
    """A layer under an activation checkpoint."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.linear, x.tanh(), use_reentrant=False)


class Plain(Recomputed):
    def forward(self, x):
        return self.linear(x.tanh())


def with_checkpoints(kind, schedule, stage):
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(4))).double()
    engine = begin({"schedule": schedule}, "adamw", model=model, stage=stage)
    losses = train(engine, [0, 1])
    state = state_of(engine)
    engine.close(restore=False)
    return losses, state


@pytest.mark.long_where(stage=[0])
@pytest.mark.long_where(schedule=["2bw"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_a_recomputation_has_the_version_of_its_forward(ranks, schedule, stage):
    want = ranks(2, with_checkpoints, Plain, schedule, stage)
    for found, expected_one in zip(
        ranks(2, with_checkpoints, Recomputed, schedule, stage), want, strict=True
    ):
        assert found[0] == expected_one[0]
        assert_same(found[1], expected_one[1])


def autocast():
    engine = begin({"schedule": "pipedream"})
    try:
        with torch.autocast("cpu", torch.bfloat16):
            train(engine, [0])
    except RuntimeError as error:
        message = str(error)
    losses = train(engine, [0])
    engine.close(restore=False)
    return message, losses


def test_autocast_is_refused_and_training_goes_on(ranks):
    losses, *_ = expected(2, {"weights": "stash"}, 1, "sgd", (0,), 6)
    for message, found in ranks(2, autocast):
        assert message.startswith("train_batch() of an asynchronous pipeline inside torch.autocast")
        assert found == pytest.approx(losses, rel=1e-6)


# ------------------------------------------------------------------------------------ batches in a row


class Counted:
    """Batches that note when each is taken; they have no length."""

    def __init__(self, numbers, num=2):
        self.numbers, self.num, self.taken = numbers, num, []

    def __iter__(self):
        for number in self.numbers:
            self.taken.append(number)
            yield tuple(batch_of(number, self.num))


def in_one_list(name, stage, numbers):
    pipeline, _, _, maker = METHODS[name]
    engine = begin({**pipeline, "num_microbatches": 2}, maker, stage=stage)
    batches = Counted(numbers)
    losses = engine.train_batches(batches, len(numbers)).tolist()
    state, steps = state_of(engine), engine.global_step
    engine.close(restore=False)
    return losses, state, steps


@pytest.mark.long_where(stage=[0])
@pytest.mark.long_where(name=["spectrain", "pb"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["pipedream", "pipemare", "spectrain", "pb"])
def test_batches_in_a_row_are_one_list_that_drains_at_its_end(ranks, name, stage):
    """Equal to one batch with all micro-batches, in the reference."""
    _, method, k, maker = METHODS[name]
    numbers = [0, 1, 2, 3, 4]
    model, make = model_of(2), MAKERS[maker]
    stages = [reference.Stage(list(model)[2 * s : 2 * s + 2], make) for s in range(2)]
    batch = [pair for one in numbers for pair in zip(*(v.chunk(2) for v in batch_of(one, 2)), strict=True)]
    found = reference.train(stages, batch, nn.functional.mse_loss, k, method)
    means = [(found[2 * i] + found[2 * i + 1]) / 2 for i in range(5)]
    results = ranks(2, in_one_list, name, stage, numbers)
    for losses, _, _ in results:
        assert losses == pytest.approx(means, rel=1e-6)
    compare([([], state, steps) for _, state, steps in results], ([], dict(model.named_parameters()), 10))


def one_after_the_other(schedule, together):
    engine = begin({"schedule": schedule, "num_microbatches": 2})
    batches = [tuple(batch_of(number, 2)) for number in range(3)]
    if together:
        losses = engine.train_batches(batches).tolist()
    else:
        losses = [engine.train_batch(*batch).item() for batch in batches]
    state = state_of(engine)
    engine.close(restore=False)
    return losses, state


def test_a_synchronous_pipeline_takes_one_batch_after_the_other(ranks):
    for one, other in zip(
        ranks(2, one_after_the_other, "1f1b", True), ranks(2, one_after_the_other, "1f1b", False), strict=True
    ):
        assert one[0] == other[0]
        assert_same(one[1], other[1])


def several_batches_of_a_list():
    engine = begin({"schedule": str(steady(2, 2)), "num_microbatches": 2, "weights": "stash"})
    try:
        engine.train_batches([tuple(batch_of(number, 2)) for number in range(2)])
    except ValueError as error:
        message = str(error)
    losses = engine.train_batches([tuple(batch_of(0, 2))]).tolist()
    engine.close(restore=False)
    return message, losses


def test_a_list_of_the_user_takes_one_batch_a_call(ranks):
    for message, losses in ranks(2, several_batches_of_a_list):
        assert message.startswith("train_batches() with a list of your own in pipeline.schedule: expected 1")
        assert len(losses) == 1


def wrong_batches():
    engine = begin({"schedule": "pipedream", "num_microbatches": 2})
    good, messages = tuple(batch_of(0, 2)), []
    calls = [
        lambda: engine.train_batches(iter([good])),
        lambda: engine.train_batches([]),
        lambda: engine.train_batches([(*good, 1)]),
        lambda: engine.train_batches(iter([]), 2),
    ]
    for call in calls:
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    losses = engine.train_batches([good, good]).tolist()
    engine.close(restore=False)
    return messages, losses


def test_batches_that_cannot_be_taken_are_refused_and_training_goes_on(ranks):
    for messages, losses in ranks(2, wrong_batches):
        assert messages == [
            "train_batches(): expected num_batches, as list_iterator has no length",
            "train_batches(): expected at least 1 batch, got 0",
            "batch 0: expected (inputs, targets) or the inputs alone, got a tuple of 3; put several inputs "
            "into a tuple or a mapping of their own",
            "expected 2 batches, got 0",
        ]
        assert losses[1] < losses[0]


def other_batches():
    engine = begin({"schedule": "pipedream", "num_microbatches": 2})
    rank = torch.distributed.get_rank()
    batches = [tuple(batch_of(number, 2)) for number in (0, 1, 2, 3 + rank)]
    try:
        engine.train_batches(batches)
    except RuntimeError as error:
        return str(error)
    return ""


def test_later_batches_that_differ_between_pipeline_ranks_are_noticed(ranks):
    for message in ranks(2, other_batches):
        assert "pipeline ranks [0, 1] have different batches" in message
