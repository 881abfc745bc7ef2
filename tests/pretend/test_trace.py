from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.pretend.clocks import Stream
from tests.pretend.findings import Kind
from tests.pretend.trace import Trace, TraceMode


@pytest.fixture
def trace() -> Iterator[Trace]:
    trace = Trace()
    with TraceMode(trace):
        yield trace


@pytest.fixture
def side(trace: Trace) -> Stream:
    return trace.timeline.stream("side")


def kinds(trace: Trace) -> set[Kind]:
    return {finding.kind for finding in trace.findings}


def test_a_strided_view_reaches_to_its_last_element(trace: Trace, side: Stream) -> None:
    x = torch.zeros(2, 3)
    side.wait_stream(trace.timeline.default)
    with side:
        x[:, 0].add_(1)
    x[1, 1:].add_(1)
    assert kinds(trace) == set()
    x[0, 1:].add_(1)  # between two elements: the model takes whole ranges
    assert kinds(trace) == {Kind.RACE}


def test_a_write_to_a_part_leaves_earlier_writes_to_the_rest(trace: Trace, side: Stream) -> None:
    x, late = torch.zeros(4), trace.timeline.stream("late")
    side.wait_stream(trace.timeline.default)
    with side:
        x[:2].add_(1)
    x[2:].sum()
    late.wait_stream(side)
    with late:
        x.sum()
    assert kinds(trace) == set()
    x.sum()
    assert kinds(trace) == {Kind.RACE}


def test_backward_is_noted(trace: Trace, side: Stream) -> None:
    layer = nn.Linear(3, 3)
    loss = layer(torch.ones(1, 3)).sum()
    with side:
        layer.weight.data.mul_(1)
    before = trace.kernels.total()
    loss.backward()
    assert trace.kernels.total() > before
    assert any("mm at" in what for _, what in trace.kernels)


def test_a_storage_ends_with_the_last_tensor_that_holds_it(trace: Trace, side: Stream) -> None:
    x = torch.zeros(3)
    view = x[1:]
    side.wait_stream(trace.timeline.default)
    with side:
        x.sum()
    del x
    torch.zeros(3)
    assert kinds(trace) == set()
    del view
    torch.zeros(3)
    assert kinds(trace) == {Kind.REUSE}


def test_an_operation_on_memory_that_was_given_back_is_refused_before_it_crashes(trace: Trace) -> None:
    x = torch.zeros(3)
    view = x[:2]
    trace.resized(x.untyped_storage(), 12, 0)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="use after free"):
        view.add_(1)
    assert kinds(trace) == {Kind.FREED}


def test_item_is_a_host_sync_and_orders_what_comes_later(trace: Trace, side: Stream) -> None:
    x = torch.zeros(3)
    x.sum().item()
    with side:
        x.add_(1)
    assert kinds(trace) == {Kind.SYNC}


def test_values_computed_from_memory_of_the_host_alone_stay_there(trace: Trace, side: Stream) -> None:
    x = torch.zeros(3)
    trace.put_on_host([x])
    with side:
        total = x.sum()
    assert total.item() == 0
    assert kinds(trace) == set()


def test_findings_name_memory_and_code(trace: Trace, side: Stream) -> None:
    x = torch.zeros(3)
    trace.name(x, "full of 'blocks.0'")
    optimizer = torch.optim.SGD([nn.Parameter(x)], lr=1.0)
    optimizer.param_groups[0]["params"][0].grad = x
    with side:
        optimizer.step()
    text = next(iter(trace.findings)).text
    assert text.startswith("full of 'blocks.0': ")
    assert "torch/optim(" in text


# -- memory of the host --------------------------------------------------------------------------------------


@pytest.fixture
def pinned(trace: Trace) -> torch.Tensor:
    with trace.paused():
        memory = torch.empty(3)
    trace.pin(memory)
    return memory


def test_the_host_reads_pinned_memory_only_when_it_has_waited_for_the_copy(
    trace: Trace, side: Stream, pinned: torch.Tensor
) -> None:
    x = torch.zeros(3)
    side.wait_stream(trace.timeline.default)
    with side:
        pinned.copy_(x, non_blocking=True)
    assert kinds(trace) == set()
    side.synchronize()
    values = pinned + 1
    assert kinds(trace) == set()
    values.add_(x.shape[0])  # is on the host
    pinned.copy_(x, non_blocking=True)
    pinned.sum()
    assert kinds(trace) == {Kind.RACE}


def test_the_host_waits_for_a_copy_into_pageable_memory_and_not_for_one_out_of_it(trace: Trace) -> None:
    with trace.paused():
        memory = torch.zeros(3)
    trace.put_on_host([memory])
    torch.zeros(3).copy_(memory, non_blocking=True)
    memory.fill_(1)
    assert kinds(trace) == set()
    memory.copy_(torch.zeros(3), non_blocking=True)
    assert kinds(trace) == {Kind.SYNC}


def test_a_kernel_takes_a_number_of_the_host_and_no_list_or_tensor(
    trace: Trace, pinned: torch.Tensor
) -> None:
    number, x = torch.tensor(2.0), torch.zeros(3)
    trace.put_on_host([number])
    x.mul_(number)
    assert kinds(trace) == set()
    for call in (lambda: torch._foreach_mul_([x], number), lambda: x + pinned):
        with pytest.raises(RuntimeError, match="on the device and on the host"):
            call()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_the_thread_of_a_transfer_may_let_memory_go_after_another_thread_has_waited(
    trace: Trace, is_awaited: bool
) -> None:
    with trace.paused():
        memory = [torch.zeros(4)]
    trace.pin(memory[0], is_kept=False)
    writing = trace.transfer(memory[0], "write", writes=False)
    with ThreadPoolExecutor(1) as waiter, ThreadPoolExecutor(1) as transfer:
        if is_awaited:
            waiter.submit(writing.synchronize).result()
        transfer.submit(memory.clear).result()
    assert kinds(trace) == (set() if is_awaited else {Kind.FREED})
