"""Clipping by the global norm, against torch.nn.utils.clip_grad_norm_ on DDP.

The norm is within 1e-6 (its sum has another order); the clipped run has the same bits at all stages.
"""

import copy
import math

import pytest
import torch

from tests.distributed.training import (
    ALL_STAGES,
    OPTIMIZERS,
    build,
    differences,
    distance_of_all,
    finish,
    flat_gradients,
    full_gradients,
    replicate,
    start,
    token_loss,
)
from tests.ranks import on_ranks

MAX_NORM = 0.3


def in_ddp(model, optimizer, num_steps):
    replica, norms, losses = replicate(model), [], []
    made = OPTIMIZERS[optimizer](replica.parameters())
    for number in range(num_steps):
        loss = token_loss(replica, number)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(replica.parameters(), MAX_NORM).item())
        made.step()
        made.zero_grad()
        losses.append(loss.item())
    return finish(replica, losses), norms


@on_ranks(2)
def test_clipping_is_that_of_torch_on_ddp_and_the_same_to_the_bit_at_all_stages():
    model, optimizer = build("tied GPT"), "AdamW"
    want, wanted_norms = in_ddp(model, optimizer, 3)
    runs, norms, found = {}, {}, []
    for stage in ALL_STAGES:
        for way in ("config", "method", "engine.step"):
            options = {} if way == "method" else {"clip_grad_norm": MAX_NORM}
            engine, made = start(copy.deepcopy(model), optimizer, stage=stage, **options)
            assert engine.grad_norm is None
            losses, norms[stage, way] = [], []
            for number in range(3):
                loss = token_loss(engine, number)
                losses.append(loss.item())
                loss.backward()
                if way == "method":
                    norm = engine.clip_grad_norm_(MAX_NORM)
                    assert norm.dtype is torch.float32
                    assert norm.dim() == 0
                    assert norm.item() == engine.grad_norm.item()
                if way == "engine.step":
                    engine.step()
                else:
                    made.step()
                    made.zero_grad()
                norms[stage, way].append(engine.grad_norm.item())
            runs[stage, way] = finish(engine, losses)
    for key, run in runs.items():
        found += differences(str(key), run, runs[0, "config"])
        found += [] if norms[key] == norms[0, "config"] else [(key, norms[key])]
    run = runs[0, "config"]
    off = [abs(a - b) / b for a, b in zip(norms[0, "config"], wanted_norms, strict=True)]
    off_loss = [abs(a - b) / b for a, b in zip(run.losses, want.losses, strict=True)]
    off_parameters = distance_of_all(run.parameters, want.parameters) if run.parameters else 0.0
    assert min(wanted_norms) > MAX_NORM  # or nothing was clipped
    assert max(off) <= 1e-6
    assert max(off_loss) <= 1e-6
    assert off_parameters <= (5e-6 if optimizer == "SGD" else 5e-5)
    return found


@on_ranks(2)
def test_gradients_are_scaled_by_the_factor_of_torch_and_only_when_the_norm_is_too_large():
    model = build("tied GPT")
    replica = replicate(model)
    token_loss(replica, 0).backward()
    torch.nn.utils.clip_grad_norm_(replica.parameters(), MAX_NORM)
    want = flat_gradients(replica)
    for stage in ALL_STAGES:
        engine, _ = start(copy.deepcopy(model), stage=stage)
        token_loss(engine, 0).backward()
        before = full_gradients(engine)
        engine.clip_grad_norm_(1e9)
        untouched = full_gradients(engine)
        engine.clip_grad_norm_(MAX_NORM)
        clipped = full_gradients(engine)
        untouched, clipped = (distance_of_all(before, untouched), distance_of_all(clipped, want))
        assert untouched == 0
        assert clipped <= 1e-6


@on_ranks(2)
def test_the_norm_is_that_of_the_accumulated_gradients():
    """Norms of two micro-batches, from engine.backward and from no_sync without a reducing backward."""
    model = build("tied GPT")
    replica = replicate(model)
    with replica.no_sync():
        (token_loss(replica, 0) / 2).backward()
    (token_loss(replica, 1) / 2).backward()
    norms = [torch.nn.utils.clip_grad_norm_(replica.parameters(), 1e9).item()]
    for stage in ALL_STAGES:
        engine, _ = start(copy.deepcopy(model), stage=stage, gradient_accumulation_steps=2)
        engine.backward(token_loss(engine, 0))
        engine.step()
        engine.backward(token_loss(engine, 1))
        norms.append(engine.clip_grad_norm_(1e9).item())
        engine, _ = start(copy.deepcopy(model), stage=stage)
        with engine.no_sync():
            for number in range(2):
                (token_loss(engine, number) / 2).backward()
        norms.append(engine.clip_grad_norm_(1e9).item())
    want, *norms = norms
    assert norms == pytest.approx([want] * len(norms), rel=1e-6)


# ------------------------------------------------------------------------------------------- other norms


@on_ranks(2)
def test_a_norm_that_is_not_finite_may_be_an_error_that_names_the_parameter():
    found = []
    for stage in ALL_STAGES:
        engine, _ = start(build("tied GPT"), stage=stage)
        token_loss(engine, 0).backward()
        parameters = dict(engine.named_parameters())
        if parameters["head.weight" if "head.weight" in parameters else "tokens.weight"].grad.numel():
            parameters["gain"].grad.fill_(math.nan)
        before = full_gradients(engine)
        for order in (1, 2, math.inf):
            with pytest.raises(RuntimeError) as error:
                engine.clip_grad_norm_(1.0, norm_type=order, error_if_nonfinite=True)
            found += [] if "'gain'" in str(error.value) else [(stage, order, str(error.value))]
        after = full_gradients(engine)
        found += [
            (stage, n) for n in before if not torch.equal(before[n].nan_to_num(), after[n].nan_to_num())
        ]
        engine.clip_grad_norm_(1.0)
        found += [] if engine.grad_norm.isnan() else [(stage, engine.grad_norm)]
    return found
