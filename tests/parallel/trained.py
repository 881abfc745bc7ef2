"""Training of a model of transformers in one process, and divided over tensor ranks."""

import torch
import torch.distributed as dist
from torch import nn

import zeroshard

STEPS, MAX_NORM = 4, 0.5


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def part(inputs, rank, size):
    return {name: value.chunk(size)[rank].contiguous() for name, value in inputs.items()}


def plain(build, batch, num_parts=1):
    """Losses, norms and parameters of one process; a loss is the mean of those of the parts of a batch."""
    model = build(0)
    optimizer, losses, norms = adamw(model.parameters()), [], []
    for number in range(STEPS):
        parts = [part(batch(number), rank, num_parts) for rank in range(num_parts)]
        loss = sum(model(**one).loss for one in parts) / num_parts
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def divided(build, batch, stage, tp, tp_plan=None):
    """The same of a divided model; ranks begin with other values, and those of rank 0 count."""
    config = {"stage": stage, "mesh": {"tp": tp}, "clip_grad_norm": MAX_NORM}
    engine = zeroshard.initialize(build(dist.get_rank()), adamw, config, tp_plan=tp_plan).engine
    axis, losses, norms = engine._axes.dp, [], []
    for number in range(STEPS):
        loss = engine(**part(batch(number), axis.rank, axis.size)).loss
        engine.backward(loss)
        engine.step()
        norms.append(engine.grad_norm.item())
        losses.append((axis.sum(loss.detach(), "test") / axis.size).item())
    state = engine.full_state_dict()
    engine.close(restore=False)
    return losses, norms, state
