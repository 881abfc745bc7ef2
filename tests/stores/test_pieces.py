"""Parameters that are stepped in pieces have the bits of those that are stepped whole."""

from __future__ import annotations

import os
import random
from unittest import mock

import pytest
import torch

from tests.checkpoint import runs
from tests.stores.tiers import BF16_MAIN, EARLY, FILES, OPTIMIZERS, WAYS, compare, offload, over, refuse_space
from zeroshard.comm.streams import Streams
from zeroshard.plan import pieces
from zeroshard.stores.pieces import NUM_OTHERS, HostPieces, Parcel
from zeroshard.stores.store import TierMemory

UNDIVIDED = {"replacing", "LAMB", "Muon"}
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


@runs.without_numba
def trained_in_pieces(folder):
    found = []
    with small_pieces():
        for name, make in OPTIMIZERS.items():
            tiers = ({},) if name in UNDIVIDED else ({}, EARLY)
            found += compare(name, {"stage": 3}, folder, make, in_files=True, tiers=tiers)
        for name in ("fused", "8-bit"):
            tiers, config = ({}, FILES, FILES | EARLY), {"stage": 3, **BF16_MAIN}
            found += compare(f"{name}, bf16", config, folder, OPTIMIZERS[name], in_files=True, tiers=tiers)
        make = over(torch.optim.SGD, lr=0.05)
        found += compare("momentum", {"stage": 3}, folder, make, train=with_a_late_state)
        config, options = WAYS["edits"]
        found += compare("edits", {"stage": 1, **config}, folder, **options)
    return found


@pytest.mark.long
def test_pieces_give_the_bits_of_whole_parameters(ranks, tmp_path):
    for found in ranks(3, trained_in_pieces, tmp_path, timeout=300):
        assert not found


def with_and_without(folder):
    """Sizes, counters and buffers of steps in pieces; differences after a load into steps without pieces."""
    config = {"stage": 3, **offload(folder, step_in_backward=True)}
    with small_pieces():
        engine = runs.start(config, OPTIMIZERS["8-bit"])
        runs.train(engine, range(2))
        numel = sorted({p.numel() for p in engine.parameters()})
        counts = {state["step"] for state in engine.optimizer.state.values()}
        buffers = engine._runtime.context.memory.staging_bytes
        num_ahead = engine._early._parts._homes[-1]._num_ahead
        engine.save_checkpoint(folder / "saved")
        runs.train(engine, range(2, 4))
    other = runs.start(config, OPTIMIZERS["8-bit"])
    other.load_checkpoint(folder / "saved")
    runs.train(other, range(2, 4))
    return numel, counts, buffers, num_ahead, runs.differences(runs.state(other), runs.state(engine))


def test_a_piece_counts_no_step_of_its_own_and_buffers_are_as_large_as_a_piece(ranks, tmp_path):
    [(numel, counts, buffers, num_ahead, differences)] = ranks(1, with_and_without, tmp_path)
    assert numel[-1] * 4 > PIECE
    assert counts == {2}
    # Values and states, each from a byte of a block on. The pieces of a unit are read ahead.
    assert 0 < buffers <= (num_ahead + NUM_OTHERS) * (3 * PIECE + 3 * 2 * 4096)
    assert not differences


def retried(folder):
    """Parameters whose moments are not those of one step, after a first step that failed and a second one."""
    with small_pieces():
        engine = runs.start({"stage": 3, **offload(folder)}, OPTIMIZERS["AdamW"])
        runs.token_loss(engine, 0).backward()
        gradients = {p: p.grad.clone() for p in engine.parameters() if p.grad is not None}  # so no step waits
        with mock.patch("os.posix_fallocate", refuse_space), pytest.raises(RuntimeError):
            engine.step()
        engine.step()
    return [
        p.fqn
        for p, gradient in gradients.items()
        if not torch.equal(
            engine.optimizer.state[p]["exp_avg"], torch.zeros_like(gradient).lerp(gradient, 0.1)
        )
    ]


def test_a_step_after_one_that_failed_in_a_piece_begins_new_states(ranks, tmp_path):
    assert ranks(1, retried, tmp_path) == [[]]


def failing(folder):
    """The errors of a step of which a write fails and of the next one, and differences after a load."""
    config = {"stage": 3, **offload(folder)}
    with small_pieces():
        want = runs.start(config, OPTIMIZERS["AdamW"])
        runs.train(want, range(4))
        engine = runs.start(config, OPTIMIZERS["AdamW"])
        runs.train(engine, range(2))
        engine.save_checkpoint(folder / "saved")
        errors = []
        with mock.patch("os.pwritev", side_effect=OSError(5, os.strerror(5))):
            for _ in range(2):
                with pytest.raises(RuntimeError) as caught:
                    runs.train(engine, [2, 3])  # the first step may wait for the second forward
                errors.append(str(caught.value))
        engine.load_checkpoint(folder / "saved")
        runs.train(engine, range(2, 4))
        return errors, runs.differences(runs.state(engine), runs.state(want))


def test_a_piece_that_could_not_be_written_is_an_error_until_a_load(ranks, tmp_path):
    [(errors, differences)] = ranks(1, failing, tmp_path)
    assert ".swap: could not write" in errors[0]
    assert "Input/output error" in errors[0]
    assert "load" in errors[1] or "Input/output error" in errors[1]
    assert not differences


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
    pieces_of_host = HostPieces(TierMemory(device, None, 0), Streams.on(device))
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
