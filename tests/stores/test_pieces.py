"""Parameters that are stepped in pieces have the bits of those that are stepped whole."""

from __future__ import annotations

import os
import random
from unittest import mock

import pytest
import torch

from tests.checkpoint import runs
from tests.ranks import on_ranks
from tests.stores.tiers import (
    BF16,
    BF16_MAIN,
    EARLY,
    FILES,
    OPTIMIZERS,
    WAYS,
    compare,
    offload,
    over,
    refuse_space,
)
from zeroshard.comm.streams import Streams
from zeroshard.plan import pieces
from zeroshard.plan.pieces import NUM_OTHERS
from zeroshard.sharding.buffer import MainStore
from zeroshard.stores.pieces import HostPieces, Parcel
from zeroshard.stores.store import TierMemory

UNDIVIDED = {"replacing", "LAMB", "LARS", "Muon"}
"""Optimizers that step no parameter in pieces."""
PIECE = 2048
"""Bytes; some parameters of the test model have ten such pieces on each of two ranks."""


def small_pieces(num_bytes=PIECE):
    """Inside, parameters are stepped in small pieces."""
    return mock.patch.object(pieces, "NEAR_BYTES", num_bytes)


def with_a_late_state(engine, steps):
    """The second step adds a state to those of each parameter, and damps all later gradients."""
    losses = runs.train(engine, steps[:1])
    for parameter in engine.parameters():
        engine.optimizer.state[parameter]["seen"] = True
    for group in engine.optimizer.param_groups:
        group.update(momentum=0.9, dampening=0.5)
    return losses + runs.train(engine, steps[1:])


@pytest.mark.long
@on_ranks(3, timeout=300)
@runs.without_numba
def test_pieces_give_the_bits_of_whole_parameters(tmp_path):
    found = []
    with small_pieces():
        for name, make in OPTIMIZERS.items():
            tiers = ({},) if name in UNDIVIDED else ({}, EARLY)
            found += compare(name, {"stage": 3}, tmp_path, make, in_files=True, tiers=tiers)
        for name in ("fused", "8-bit"):
            tiers, config = ({}, FILES, FILES | EARLY), {"stage": 3, **BF16_MAIN}
            found += compare(f"{name}, bf16", config, tmp_path, OPTIMIZERS[name], in_files=True, tiers=tiers)
        make = over(torch.optim.SGD, lr=0.05)
        found += compare("momentum", {"stage": 3}, tmp_path, make, train=with_a_late_state)
        config, options = WAYS["edits"]
        found += compare("edits", {"stage": 1, **config}, tmp_path, **options)
    return found


@on_ranks(1)
@runs.without_numba
def test_a_piece_counts_no_step_of_its_own_and_buffers_are_as_large_as_a_piece(tmp_path):
    """What it saved goes on in steps of whole parameters."""
    config = {"stage": 3, **offload(tmp_path, step_in_backward=True)}
    with small_pieces():
        engine = runs.start(config, OPTIMIZERS["8-bit"])
        runs.train(engine, range(2))
        assert max(p.numel() for p in engine.parameters()) * 4 > PIECE
        assert {state["step"] for state in engine.optimizer.state.values()} == {2}
        # Values and states, each from a byte of a block on. The pieces of a unit are read ahead.
        most = engine._early._parts._homes[-1]._num_ahead + NUM_OTHERS
        assert 0 < engine._runtime.context.memory.staging_bytes <= most * (3 * PIECE + 3 * 2 * 4096)
        engine.save_checkpoint(tmp_path / "saved")
        runs.train(engine, range(2, 4))
    other = runs.start(config, OPTIMIZERS["8-bit"])
    other.load_checkpoint(tmp_path / "saved")
    runs.train(other, range(2, 4))
    return runs.differences(runs.state(other), runs.state(engine))


@on_ranks(1)
def test_a_step_after_one_that_failed_in_a_piece_begins_new_states(tmp_path):
    with small_pieces():
        engine = runs.start({"stage": 3, **offload(tmp_path)}, OPTIMIZERS["AdamW"])
        runs.token_loss(engine, 0).backward()
        gradients = {p: p.grad.clone() for p in engine.parameters() if p.grad is not None}  # so no step waits
        with mock.patch("os.posix_fallocate", refuse_space), pytest.raises(RuntimeError):
            engine.step()
        engine.step()
    for p, gradient in gradients.items():
        moment = engine.optimizer.state[p]["exp_avg"]
        assert torch.equal(moment, torch.zeros_like(gradient).lerp(gradient, 0.1)), p.fqn


@on_ranks(1)
def test_a_piece_that_could_not_be_written_is_an_error_until_a_load(tmp_path):
    config = {"stage": 3, **offload(tmp_path)}
    with small_pieces():
        want, engine = (runs.start(config, OPTIMIZERS["AdamW"]) for _ in range(2))
        runs.train(want, range(4))
        runs.train(engine, range(2))
        engine.save_checkpoint(tmp_path / "saved")
        with mock.patch("os.pwritev", side_effect=OSError(5, os.strerror(5))):
            # The first step may wait for the second forward.
            errors = [runs.refusal(lambda: runs.train(engine, [2, 3])) for _ in range(2)]
        assert f"{tmp_path}: could not write" in errors[0]
        assert "Input/output error" in errors[0]
        assert "load" in errors[1] or "Input/output error" in errors[1]
        engine.load_checkpoint(tmp_path / "saved")
        runs.train(engine, range(2, 4))
        return runs.differences(runs.state(engine), runs.state(want))


class Numbers(Parcel):
    """Eight numbers."""

    def __init__(self, first):
        self.values = torch.arange(first, first + 8, dtype=torch.float32)
        self.span = slice(0, 0)

    def lay_out(self):
        self.span = slice(0, self.values.nbytes)
        return self.span.stop

    def sources(self, piece=None):
        return [(self.values.view(torch.uint8), self.span)]


@pytest.mark.parametrize("num_ahead", range(1, 6))
def test_parcels_are_read_and_written_in_any_order(num_ahead):
    """Also those that are expected and not fetched, and those that nobody expected."""
    device = torch.device("cpu")
    pieces_of_host = HostPieces(TierMemory(device, None), Streams.on(device))
    for seed in range(100):
        chance = random.Random(seed)
        parcels = [Numbers(8 * number) for number in range(chance.randint(1, 9))]
        fetched = [parcel for parcel in parcels if chance.random() < 0.8]
        chance.shuffle(fetched)
        pieces_of_host.expect([one for one in parcels if chance.random() < 0.8], num_ahead)
        for parcel in fetched:
            piece = pieces_of_host.fetch(parcel)
            held = piece.memory[parcel.span].view(torch.float32)
            assert torch.equal(held, parcel.values), f"seed {seed}: also after others were read ahead"
            held.neg_()
            with pieces_of_host.writing(parcel.sources(), piece):
                pass
        pieces_of_host.wait()
        for number, parcel in enumerate(parcels):
            sign = -1 if parcel in fetched else 1
            assert torch.equal(parcel.values, sign * Numbers(8 * number).values), f"seed {seed}"


@on_ranks(1, 3)
def test_a_step_in_parts_keeps_the_copy_that_gathers_read(tmp_path):
    """Nobody casts main parameters anew that a step at once, late or in a backward has cast."""
    makings, load = [], MainStore.load

    def noted(store, out, start=0):
        makings.append(store.copy is not None and out is store.copy.values)
        load(store, out, start)

    for tier in (FILES, FILES | EARLY):
        with small_pieces(), mock.patch.object(MainStore, "load", noted):
            engine = runs.start({"stage": 3, **BF16, **offload(tmp_path, **tier)}, OPTIMIZERS["fused"])
            assert [buffer for buffer in engine._runtime.buffers if buffer.store.copy is not None]
            makings.clear()
            runs.train(engine, range(3))
        assert not any(makings), tier
        with torch.no_grad():  # an edit outdates it
            next(engine.parameters()).mul_(0.5)
        with mock.patch.object(MainStore, "load", noted):
            runs.train(engine, [3])
        assert sum(makings) == 1
        engine.close(restore=False)
