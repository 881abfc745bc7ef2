"""What would be lost, half saved or half loaded is refused, and the engine goes on."""

import json
import zlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ConstantLR, SequentialLR

from tests.checkpoint.runs import differences, start, state, token_loss, train


def message_of(call, kind=RuntimeError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def save_what_is_shown(folder):
    engine = start({"stage": 3, "checkpoint": {"keep_last": 1}})
    train(engine, [0])
    engine.save_checkpoint(folder, "good")
    before, found = state(engine), []
    with engine.unsharded():
        found.append(message_of(lambda: engine.save_checkpoint(folder)))
        found.append(message_of(lambda: engine.load_checkpoint(folder)))
        found.append(message_of(lambda: engine.save_pretrained(folder / "out")))
    train(engine, [1])
    engine.load_checkpoint(folder)
    return found, differences(state(engine), before)


def test_full_parameters_that_are_shown_are_not_taken_for_the_models_own(ranks, tmp_path):
    for messages, found in ranks(2, save_what_is_shown, tmp_path):
        assert all("() inside engine.unsharded()" in message for message in messages)
        assert found == []


def save_after_no_sync(folder):
    engine = start(3)
    with engine.no_sync():
        engine.backward(token_loss(engine, 0))
    message = message_of(lambda: engine.save_checkpoint(folder))
    engine.zero_grad()
    engine.save_checkpoint(folder)
    return message


def test_gradients_that_were_not_reduced_yet_are_not_left_out(ranks, tmp_path):
    for message in ranks(2, save_after_no_sync, tmp_path):
        assert "after a backward under no_sync()" in message


class Remembers(SGD):
    """Keeps a state in a way that is given."""

    remember = staticmethod(lambda parameter: {})

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(self.remember(parameter))


class KeepsList(Remembers):
    remember = staticmethod(lambda parameter: {"history": [parameter.detach().clone()]})


class HasPath(Remembers):
    remember = staticmethod(lambda parameter: {"a/b": 1.0})


class HasNumber(Remembers):
    remember = staticmethod(lambda parameter: {0: 1.0})


def save_unknown_state(folder, kind):
    with pytest.warns(UserWarning, match="is not known to zeroshard"):
        engine = start(3, lambda model: kind(model.parameters(), lr=0.01))
    train(engine, [0])
    return message_of(lambda: engine.save_checkpoint(folder), ValueError)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (KeepsList, "state 'history' of 'mix' is a list of tensors"),
        (HasPath, "names without '/', got 'a/b'"),
        (HasNumber, "names without '/', got 0"),
    ],
)
def test_states_that_could_not_be_told_apart_again_are_refused_by_name(ranks, tmp_path, kind, expected):
    for message in ranks(2, save_unknown_state, tmp_path, kind):
        assert expected in message
    assert not list(tmp_path.iterdir())


def schedule_of(num_parts):
    def build(optimizer):
        parts = [ConstantLR(optimizer, 0.5) for _ in range(num_parts)]
        return SequentialLR(optimizer, parts, milestones=list(range(2, num_parts + 1)))

    return build


def load_another_schedule(folder):
    engine = start(3, lr_scheduler=schedule_of(3))
    train(engine, [0])
    engine.save_checkpoint(folder)
    other = start(3, seed=1, lr_scheduler=schedule_of(2))
    before = state(other)
    message = message_of(lambda: other.load_checkpoint(folder), ValueError)
    found = differences(state(other), before)
    other.load_checkpoint(folder, restore_hyperparameters=False)
    train(other, range(5))
    return message, found


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_a_schedule_of_another_number_of_parts_is_refused_before_anything_changes(ranks, tmp_path):
    for message, found in ranks(2, load_another_schedule, tmp_path):
        assert "an LR schedule of 3 parts, the engine has one of 2" in message
        assert found == []


def go_on_with_adamw(folder):
    def adamw(model):
        return AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)

    engine = start(3, lambda model: Adam(model.parameters(), lr=1e-2, weight_decay=0.5))
    train(engine, [0])
    engine.save_checkpoint(folder)
    plain = start(0, adamw, seed=1)
    plain.load_checkpoint(folder, convert_states=True)
    with pytest.raises(ValueError, match="holds states of Adam; the engine has AdamW"):
        start(3, adamw).load_checkpoint(folder)
    other = start(3, adamw, seed=1)
    other.load_checkpoint(folder, convert_states=True)
    (group,) = other.optimizer.param_groups
    expected = AdamW([nn.Parameter(torch.ones(1))]).param_groups[0]
    return {
        key: (group[key], value) for key, value in expected.items() if key == "decoupled_weight_decay"
    }, train(other, range(1, 4)) != train(engine, range(1, 4))


def test_adams_states_in_adamw_go_on_as_adamw(ranks, tmp_path):
    for kinds, is_other in ranks(2, go_on_with_adamw, tmp_path):
        assert all(mine == torchs for mine, torchs in kinds.values())
        assert is_other


def steps_of_a_plain_loop(folder):
    engine = start(3)
    for number in range(2):
        token_loss(engine, number).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        engine.save_checkpoint(folder)
    return engine.global_step, sorted(path.name for path in folder.iterdir() if path.is_file())


def test_a_plain_loop_counts_its_steps_too(ranks, tmp_path):
    assert ranks(2, steps_of_a_plain_loop, tmp_path) == [(2, ["latest", "step-1", "step-2"])] * 2


def save_elsewhere(folder):
    engine = start(3)
    train(engine, [0])
    before = state(engine)
    with torch.device("meta"):
        engine.save_checkpoint(folder, "now")
        engine.save_checkpoint(folder, "later", blocking=False)
    found = []
    for tag in ("now", "later"):
        train(engine, [1])
        with torch.device("meta"):
            engine.load_checkpoint(folder, tag)
        found += differences(state(engine), before)
    return found


def test_the_default_device_does_not_matter(ranks, tmp_path):
    assert ranks(2, save_elsewhere, tmp_path) == [[], []]


def copy_without_memory(folder, monkeypatch_rank):
    from zeroshard.checkpoint.save import SnapshotMemory

    engine, original = start(3), SnapshotMemory.copy

    def fail(self, slices, memory):
        raise RuntimeError("no memory")

    if dist.get_rank() == monkeypatch_rank:
        SnapshotMemory.copy = fail
    try:
        message = message_of(lambda: engine.save_checkpoint(folder, blocking=False))
    finally:
        SnapshotMemory.copy = original
    train(engine, [0])
    engine.save_checkpoint(folder, blocking=False)
    engine.load_checkpoint(folder)
    return message


def test_a_copy_that_fails_on_one_rank_fails_on_all(ranks, tmp_path):
    assert ranks(2, copy_without_memory, tmp_path, 1) == ["no memory (rank 1)"] * 2


def copy_that_fails_on_the_device(folder):
    """On rank 1 the device reports an error when the thread waits for the copies."""
    from zeroshard.checkpoint.save import SnapshotMemory

    engine, original = start(3), SnapshotMemory.copy

    def copy(self, slices, memory):
        def wait():
            raise RuntimeError("device lost")

        return original(self, slices, memory)[0], wait

    if dist.get_rank() == 1:
        SnapshotMemory.copy = copy
    try:
        engine.save_checkpoint(folder, blocking=False)
    finally:
        SnapshotMemory.copy = original
    message = message_of(lambda: engine.save_checkpoint(folder, blocking=False))
    engine.save_checkpoint(folder)
    return message, [path.name for path in sorted(folder.iterdir())]


def test_an_error_of_the_device_while_copies_are_made_is_told_to_all_ranks(ranks, tmp_path):
    for message, names in ranks(2, copy_that_fails_on_the_device, tmp_path):
        assert message == "the checkpoint that was saved in the background failed: device lost (rank 1)"
        assert names == ["latest", "step-0", "step-0.0"]


def train_unevenly(folder):
    engine = start(1)
    train(engine, [0])
    engine.save_checkpoint(folder, blocking=False)
    for number in range(1, 4):
        if dist.get_rank() == 0:
            token_loss(engine, number)  # nothing is exchanged in a forward at stage 1
        train(engine, [number])
    return engine.global_step


def test_uneven_forwards_go_on_beside_a_save_where_parameters_are_replicated(ranks, tmp_path):
    assert ranks(2, train_unevenly, tmp_path) == [4, 4]


def save_slice_for_user(folder):
    engine = start(3)
    slice_of = next(iter(engine.parameters()))
    message = message_of(
        lambda: engine.save_checkpoint(folder, client_state={"best": [slice_of]}), ValueError
    )
    big = torch.zeros(1 << 20)
    engine.save_checkpoint(folder, client_state={"few": big[:3]})
    few = engine.load_checkpoint(folder)["few"]
    return message, few.tolist(), (folder / "step-0.0" / "values.safetensors").stat().st_size


def test_client_state_holds_no_slices_and_no_more_than_it_shows(ranks, tmp_path):
    for message, few, size in ranks(2, save_slice_for_user, tmp_path):
        assert "client_state['best'][0]: expected tensors" in message
        assert "got zeroshard.parameters.sharded.ShardedParameter" in message
        assert few == [0.0] * 3
        assert size < 1 << 20


def load_in_inference_mode(folder):
    engine = start(3)
    train(engine, [0])
    engine.save_checkpoint(folder)
    other = start(3, seed=1)
    with torch.inference_mode():
        other.load_checkpoint(folder)
    return train(other, [1, 2]) == train(engine, [1, 2])


def test_what_was_loaded_in_inference_mode_trains(ranks, tmp_path):
    assert all(ranks(2, load_in_inference_mode, tmp_path))


def load_tampered(folder, key, value):
    data = torch.utils.data.TensorDataset(torch.arange(10))
    config = {"stage": 0, "precision": {"param_dtype": "float16"}}
    engine = start(config, training_data=data)
    engine.save_checkpoint(folder, "t")
    file = folder / "t.0" / "zeroshard.json"
    if dist.get_rank() == 0:
        content = json.loads(file.read_text())["content"] | {key: value}
        crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        file.write_text(json.dumps({"crc32": crc, "content": content}))
    dist.barrier()
    other = start(config, seed=1, training_data=data)
    before = state(other)
    message = message_of(lambda: other.load_checkpoint(folder))
    return message, differences(state(other), before)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss_scale", {"x": 1}),
        ("loss_scale", {"value": "a", "is_dynamic": True, "num_steps": 0}),
        ("data", {"epoch": -1, "position": 0, "seed": 0, "num_samples": 10}),
        ("data", {"x": 1}),
    ],
)
def test_a_manifest_of_other_things_is_refused_before_anything_changes(ranks, tmp_path, key, value):
    for message, found in ranks(2, load_tampered, tmp_path, key, value):
        assert "t.0" in message
        assert "damaged" in message
        assert "in part" not in message
        assert found == []


class Stubborn(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        raise ValueError("I will not")


def load_stubborn(folder):
    engine = start(3, model=nn.Sequential(Stubborn(3, 3)))
    engine.save_checkpoint(folder)
    return message_of(lambda: engine.load_checkpoint(folder))


def test_a_module_that_refuses_its_state_is_told_to_leave_the_engine_half_loaded(ranks, tmp_path):
    for message in ranks(2, load_stubborn, tmp_path):
        assert "I will not" in message
        assert "loaded only in part" in message
