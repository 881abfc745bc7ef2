from __future__ import annotations

import threading

import pytest

from tests.pretend.clocks import Event, Timeline


def test_an_operation_is_ordered_before_later_ones_of_its_stream() -> None:
    stream = Timeline().stream("a")
    point = stream.issue()
    assert stream.has_seen(point)


def test_streams_are_not_ordered_by_themselves() -> None:
    timeline = Timeline()
    point = timeline.stream("a").issue()
    assert not timeline.stream("b").has_seen(point)


def test_a_wait_orders_what_was_issued_before_it_and_nothing_later() -> None:
    timeline = Timeline()
    a, b = timeline.stream("a"), timeline.stream("b")
    before = a.issue()
    b.wait_stream(a)
    after = a.issue()
    assert b.has_seen(before)
    assert not b.has_seen(after)


def test_an_event_is_the_point_where_it_was_recorded() -> None:
    timeline = Timeline()
    a, b = timeline.stream("a"), timeline.stream("b")
    before = a.issue()
    event = a.record_event()
    after = a.issue()
    b.wait_event(event)
    assert b.has_seen(before)
    assert not b.has_seen(after)


def test_waits_add_up_over_several_streams() -> None:
    timeline = Timeline()
    a, b, c = (timeline.stream(name) for name in "abc")
    point = a.issue()
    b.wait_stream(a)
    c.wait_event(b.record_event())
    assert c.has_seen(point)


def test_what_the_host_has_waited_for_is_before_all_that_it_issues_later() -> None:
    timeline = Timeline()
    a, b = timeline.stream("a"), timeline.stream("b")
    point = a.issue()
    a.synchronize()
    assert b.has_seen(point)
    issued = b.issue()
    timeline.default.wait_stream(b)
    assert timeline.default.has_seen(point)
    assert timeline.default.has_seen(issued)


def test_an_event_can_be_waited_for_by_the_host() -> None:
    timeline = Timeline()
    a = timeline.stream("a")
    point = a.issue()
    event = Event(timeline)
    event.record(a)
    event.synchronize()
    assert timeline.stream("b").has_seen(point)


def test_each_thread_has_a_current_stream_of_its_own() -> None:
    timeline = Timeline()
    seen = []
    with timeline.stream("a") as a:
        assert timeline.current is a
        thread = threading.Thread(target=lambda: seen.append(timeline.current))
        thread.start()
        thread.join()
    assert seen == [timeline.default]
    assert timeline.current is timeline.default


def test_contexts_of_streams_nest() -> None:
    timeline = Timeline()
    with timeline.stream("a") as a:
        with timeline.stream("b") as b:
            assert timeline.current is b
        assert timeline.current is a


def test_a_stream_is_not_entered_twice() -> None:
    stream = Timeline().stream("a")
    with stream, pytest.raises(AssertionError, match="not entered twice"):
        stream.__enter__()


def test_names_of_streams_are_unique() -> None:
    timeline = Timeline()
    assert [timeline.stream("gather").name for _ in range(2)] == ["gather", "gather2"]
