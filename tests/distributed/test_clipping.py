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
    train,
)

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


def clip(kind, optimizer):
    """(distances from DDP of norms, losses, parameters; differences between stages and ways)"""
    model = build(kind)
    want, wanted_norms = in_ddp(model, optimizer, 5)
    runs, norms, found = {}, {}, []
    for stage in ALL_STAGES:
        for way in ("config", "method", "engine.step"):
            options = {} if way == "method" else {"clip_grad_norm": MAX_NORM}
            engine, made = start(copy.deepcopy(model), optimizer, stage=stage, **options)
            assert engine.grad_norm is None
            losses, norms[stage, way] = [], []
            for number in range(5):
                loss = token_loss(engine, number)
                losses.append(loss.item())
                loss.backward()
                if way == "method":
                    norm = engine.clip_grad_norm_(MAX_NORM)
                    assert (norm.dtype, norm.dim(), norm.item()) == (
                        torch.float32,
                        0,
                        engine.grad_norm.item(),
                    )
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
    return max(off), max(off_loss), off_parameters, found, min(wanted_norms)


@pytest.mark.long_where(num_ranks=[1, 3])
@pytest.mark.parametrize(
    ("num_ranks", "kind", "optimizer"), [(1, "GPT", "SGD"), (2, "tied GPT", "AdamW"), (3, "Llama", "SGD")]
)
def test_clipping_is_that_of_torch_on_ddp_and_the_same_to_the_bit_at_all_stages(
    ranks, num_ranks, kind, optimizer
):
    for off, off_loss, off_parameters, found, least in ranks(num_ranks, clip, kind, optimizer):
        assert least > MAX_NORM  # or nothing was clipped
        assert found == []
        assert off <= 1e-6
        assert off_loss <= 1e-6
        assert off_parameters <= (5e-6 if optimizer == "SGD" else 5e-5)


def clipped_gradients():
    """Distance of the gradients that are left, and whether a large limit leaves them alone."""
    model, found = build("tied GPT"), []
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
        found.append((distance_of_all(before, untouched), distance_of_all(clipped, want)))
    return found


def test_gradients_are_scaled_by_the_factor_of_torch_and_only_when_the_norm_is_too_large(ranks):
    for found in ranks(2, clipped_gradients):
        for untouched, clipped in found:
            assert untouched == 0
            assert clipped <= 1e-6


def clip_what_was_deferred():
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
    return norms


def test_the_norm_is_that_of_the_accumulated_gradients(ranks):
    for want, *norms in ranks(2, clip_what_was_deferred):
        assert norms == pytest.approx([want] * len(norms), rel=1e-6)


def deferred_with_config():
    """Config.clip_grad_norm sees what no_sync left when the optimizer is stepped directly."""
    norms, model = [], build("tied GPT")
    for stage in ALL_STAGES:
        for defer in (False, True):
            engine, optimizer = start(copy.deepcopy(model), "SGD", stage=stage, clip_grad_norm=MAX_NORM)
            if defer:
                with engine.no_sync():
                    token_loss(engine, 0).backward()
            else:
                token_loss(engine, 0).backward()
            optimizer.step()
            norms.append(engine.grad_norm.item())
    return norms


def test_a_plain_step_reduces_what_no_sync_left_before_it_clips(ranks):
    for norms in ranks(2, deferred_with_config):
        assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-6)
        assert norms[0] > MAX_NORM


def no_gradients():
    engine, optimizer = start(build("tied GPT"), stage=3, clip_grad_norm=MAX_NORM)
    norm = engine.clip_grad_norm_(1.0).item()
    optimizer.step()
    before = finish(engine, [])
    run = train(engine, optimizer, 1)
    return norm, engine.grad_norm.item() > 0, before.parameters.keys() == run.parameters.keys()


def test_without_gradients_the_norm_is_zero(ranks):
    assert ranks(2, no_gradients) == [(0.0, True, True)] * 2


# ------------------------------------------------------------------------------------------- other norms


def other_norms(orders):
    """By order and stage, distances of the norm and of what is left from those of torch on DDP."""
    model, found = build("tied GPT"), []
    for order in orders:
        replica = replicate(model)
        token_loss(replica, 0).backward()
        whole = torch.cat(list(flat_gradients(replica).values())).double()
        want_norm = torch.linalg.vector_norm(whole, float(order))
        torch.nn.utils.clip_grad_norm_(replica.parameters(), 0.01, norm_type=order)
        want = flat_gradients(replica)
        for stage in ALL_STAGES:
            engine, _ = start(copy.deepcopy(model), stage=stage)
            token_loss(engine, 0).backward()
            norm = engine.clip_grad_norm_(0.01, norm_type=order)
            assert norm is engine.grad_norm
            off = abs(norm.item() / want_norm.item() - 1)
            found.append((order, stage, off, distance_of_all(full_gradients(engine), want)))
    return found


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_norms_of_any_order_are_those_of_torch(ranks, num_ranks):
    """The norm is that of float64; what is left is that of torch, which adds up in float32."""
    for found in ranks(num_ranks, other_norms, (1, 3.0, "inf")):
        assert [line for line in found if line[2] > 1e-6 or line[3] > 3e-5] == []


def nonfinite_norms():
    """What is raised where a gradient of one rank's slice is inf, and whether gradients stay."""
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


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_norm_that_is_not_finite_may_be_an_error_that_names_the_parameter(ranks, num_ranks):
    assert ranks(num_ranks, nonfinite_norms) == [[]] * num_ranks


def clip_by_value():
    model, found = build("tied GPT"), []
    replica = replicate(model)
    token_loss(replica, 0).backward()
    torch.nn.utils.clip_grad_value_(replica.parameters(), 1e-4)
    want = flat_gradients(replica)
    for stage in ALL_STAGES:
        engine, _ = start(copy.deepcopy(model), stage=stage)
        token_loss(engine, 0).backward()
        torch.nn.utils.clip_grad_value_(engine.parameters(), 1e-4)
        found.append(distance_of_all(full_gradients(engine), want))
    return found


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_clip_grad_value_of_torch_clips_slices_as_the_whole(ranks, num_ranks):
    for found in ranks(num_ranks, clip_by_value):
        assert max(found) <= 1e-6


def refused_orders():
    engine, _ = start(build("tied GPT"), stage=1)
    messages = []
    for order in (0, -1, -math.inf, math.nan, "nan"):
        with pytest.raises(ValueError, match="norm_type") as error:
            engine.clip_grad_norm_(1.0, norm_type=order)
        messages.append(repr(order) in str(error.value))
    return messages


def test_an_order_that_is_not_above_zero_is_refused(ranks):
    assert ranks(1, refused_orders) == [[True] * 5]
