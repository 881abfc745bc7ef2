"""Remedies in errors about steps, batches and micro-batches are followed, and they work."""

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


def test_the_number_of_batches_is_given():
    engine = start(loss_fn=mean_square)
    with told("has no len()", TypeError):
        engine.train_batches((DATA, DATA) for _ in range(2))
    engine.train_batches(((DATA, DATA) for _ in range(2)), num_batches=2)
    same(whole(engine), trained(losses=[loss_of] * 2))


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
