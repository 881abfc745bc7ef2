"""Remedies in errors about steps, batches and micro-batches are followed, and they work."""

import pytest
import torch
from torch.optim import AdamW

from tests.remedies.told import (
    DATA,
    loss_of,
    mean_square,
    same,
    start,
    take_step,
    told,
    trained,
    trains,
    warned,
    whole,
)


def test_another_number_of_micro_batches_after_the_step():
    engine = start(gradient_accumulation_steps=2)
    take_step(engine)
    for end in (engine.zero_grad, lambda: take_step(engine)):
        with told("Call it after step() or zero_grad()"):
            engine.set_gradient_accumulation_steps(1)
        end()
        engine.set_gradient_accumulation_steps(1)
        engine.set_gradient_accumulation_steps(2)
        take_step(engine)
    engine.zero_grad()
    same(whole(engine), trained())


def test_train_batch_after_the_step():
    for end in ("zero_grad", "step"):
        engine = start(gradient_accumulation_steps=2, loss_fn=mean_square)
        take_step(engine)
        with told("end it with backward() and step(), or drop it with zero_grad()"):
            engine.train_batch(DATA, DATA)
        engine.zero_grad() if end == "zero_grad" else take_step(engine)
        engine.train_batch(DATA, DATA)

        def halves(model):
            return loss_of(model, DATA[:2]) / 2 + loss_of(model, DATA[2:]) / 2

        want = trained(losses=[loss_of, halves] if end == "step" else [halves])
        for name, value in whole(engine).items():
            torch.testing.assert_close(value, want[name], atol=1e-5, rtol=1e-4)


def test_train_batch_counts_again():
    engine = start(loss_fn=mean_square)
    engine.set_gradient_accumulation_boundary(True)
    with told("call set_gradient_accumulation_boundary(None) before it"):
        engine.train_batch(DATA, DATA)
    engine.set_gradient_accumulation_boundary(None)
    engine.train_batch(DATA, DATA)
    same(whole(engine), trained())


def test_an_optimizer_is_given_to_initialize():
    engine = start(optimizer=None, loss_fn=mean_square)
    for call in (lambda: engine.train_batch(DATA, DATA), engine.step):
        with told("needs an optimizer: give one to zeroshard.initialize"):
            call()
    with told("needs an optimizer: give one to zeroshard.initialize"):
        engine.full_optimizer_state("gain")
    engine.close()
    trains(start(engine.module))


def test_a_loss_function_is_given():
    engine = start()
    with told("train_batch() needs loss_fn= at initialize"):
        engine.train_batch(DATA)
    engine = start(loss_fn=mean_square)
    engine.train_batch(DATA, DATA)
    same(whole(engine), trained())


def test_the_number_of_batches_is_given():
    engine = start(loss_fn=mean_square)
    with told("expected num_batches, as generator has no length"):
        engine.train_batches((DATA, DATA) for _ in range(2))
    engine.train_batches(((DATA, DATA) for _ in range(2)), num_batches=2)
    same(whole(engine), trained(losses=[loss_of] * 2))


def test_the_engine_steps_in_float16():
    engine = start(precision={"param_dtype": "float16", "loss_scale": 8.0})
    with told("call engine.backward(loss), not loss.backward()"):
        loss_of(engine).backward()
    engine.zero_grad()
    engine.backward(loss_of(engine))
    with told("call engine.step(), not optimizer.step()"):
        engine.optimizer.step()
    before = whole(engine)
    engine.step()
    assert engine.skipped_steps == 0
    assert any(not torch.equal(value, before[name]) for name, value in whole(engine).items())


def test_nonfinite_gradients_are_left_out_by_the_engine():
    engine = start(nonfinite="skip")
    engine.backward(loss_of(engine))
    with told("call engine.step(), not optimizer.step()"):
        engine.optimizer.step()
    engine.step()
    same(whole(engine), trained())


def test_clipping_needs_no_closure():
    engine = start(clip_grad_norm=100.0)

    def closure():
        loss = loss_of(engine)
        loss.backward()
        return loss

    with told("call engine.backward(loss), then step() without a closure"):
        engine.optimizer.step(closure)
    engine.zero_grad()
    engine.backward(loss_of(engine))
    engine.optimizer.step()
    same(whole(engine), trained())


def test_a_step_without_gradients_is_preceded_by_a_backward():
    engine = start()
    with warned("Call engine.backward(loss) before it"):
        engine.step()
    trains(engine)


def test_only_the_engine_counts_micro_batches():
    def accumulate(engine, number=2):
        for _ in range(number):
            (loss_of(engine) / 2).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    want = trained(losses=[lambda model: loss_of(model) / 2 + loss_of(model) / 2])
    engine = start(gradient_accumulation_steps=2)
    with warned("Call engine.backward(loss) and engine.step() for each micro-batch"):
        accumulate(engine, 1)
    engine = start(gradient_accumulation_steps=2)
    for _ in range(2):
        take_step(engine)
    same(whole(engine), want)
    engine = start(gradient_accumulation_steps=1)
    accumulate(engine)
    same(whole(engine), want)


def test_zero_grad_is_left_out_of_the_loop():
    engine = start(gradient_accumulation_steps=2)
    with warned("leave zero_grad() out of the loop"):
        for _ in range(4):
            engine.zero_grad()
            take_step(engine)
    engine = start(gradient_accumulation_steps=2)
    for _ in range(4):
        take_step(engine)
    same(whole(engine), trained(losses=[loss_of] * 2))


def test_a_step_in_the_backward_is_switched_off():
    for reader in (
        lambda engine: engine.clip_grad_norm_(1.0),
        lambda engine: engine.set_full_gradient("inner.weight", torch.ones(10, 7)),
        lambda engine: engine.zero_grad(),
        lambda engine: engine.backward(loss_of(engine)),
    ):
        engine = start(offload={"step_in_backward": True})
        engine.backward(loss_of(engine))
        with told("set offload.step_in_backward=False"):
            reader(engine)
        engine = start()
        engine.backward(loss_of(engine))
        reader(engine)


def test_the_learning_rate_is_changed_before_the_backward():
    engine = start(offload={"step_in_backward": True})
    engine.backward(loss_of(engine))
    engine.optimizer.param_groups[0]["lr"] = 0.1
    with told("change it before backward, or set offload.step_in_backward=False"):
        engine.step()
    for stepped in (True, False):
        engine = start(offload={"step_in_backward": stepped})
        if stepped:
            engine.optimizer.param_groups[0]["lr"] = 0.1
        engine.backward(loss_of(engine))
        engine.optimizer.param_groups[0]["lr"] = 0.1
        engine.step()
        same(whole(engine), trained(optimizer=lambda parameters: AdamW(parameters, lr=0.1)))


def test_zero_grad_waits_for_the_step():
    engine = start(offload={"step_in_backward": True})
    engine.backward(loss_of(engine))
    with told("call step() to end their step"):
        engine.zero_grad()
    engine.step()
    take_step(engine)
    same(whole(engine), trained(losses=[loss_of] * 2))


def test_a_failed_step_in_the_backward_is_loaded_again(tmp_path):
    engine = start(stage=3, offload={"step_in_backward": True})
    engine.save_checkpoint(tmp_path)

    def fail(*_):
        raise KeyError

    handle = engine.module.inner.register_full_backward_pre_hook(fail)
    with pytest.raises(KeyError):
        engine.backward(loss_of(engine))
    handle.remove()
    with told("Load the last checkpoint with engine.load_checkpoint()"):
        engine.step()
    engine.load_checkpoint(tmp_path)
    trains(engine)
