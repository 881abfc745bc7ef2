"""Spans divide the time of a timeline, whatever begins and ends in it."""

from itertools import count, pairwise

from hypothesis import given
from hypothesis import strategies as st

from zeroshard.profiling.report import OTHER, Label, PhaseTimeline, add_up

FORWARD, BACKWARD, GATHER, WAIT = (Label(kind, "a") for kind in ("forward", "backward", "gather", "wait"))


def timeline_of(events):
    """A timeline on which a second passes at each event, closed at the end."""
    clock = count()
    timeline, depth = PhaseTimeline(lambda: float(next(clock))), 0
    for event in events:
        if isinstance(event, Label) and event in (FORWARD, BACKWARD):
            timeline.enter(event)
        elif isinstance(event, Label):
            timeline.begin(event)
            depth += 1
        elif event == "end" and depth:
            timeline.end()
            depth -= 1
        elif event == "step":
            timeline.end_step()
    timeline.cut()
    return timeline


EVENTS = st.lists(st.sampled_from([FORWARD, BACKWARD, GATHER, WAIT, "end", "step"]))


@given(EVENTS)
def test_spans_leave_no_gap_and_do_not_overlap(events):
    timeline = timeline_of(events)
    spans = timeline.spans(timeline.moments)
    assert spans[0].start == timeline.moments[0]
    assert spans[-1].stop == timeline.moments[-1]
    assert all(one.stop == other.start for one, other in pairwise(spans))
    total = sum(add_up(spans, lambda span: span.label).values())
    assert total == timeline.moments[-1] - timeline.moments[0]


@given(EVENTS)
def test_spans_from_the_end_of_a_step_are_the_last_ones(events):
    timeline = timeline_of(events)
    spans = timeline.spans(timeline.moments)
    for end in timeline.ends:
        later = timeline.spans(timeline.moments, end)
        assert later == spans[len(spans) - len(later) :]
        assert later[0].start == timeline.moments[end]


def test_time_belongs_to_the_innermost_task():
    timeline = timeline_of([FORWARD, GATHER, WAIT, "end", "end", BACKWARD])
    labels = [(span.phase, span.label) for span in timeline.spans(timeline.moments)]
    assert labels == [
        (OTHER, OTHER),
        (FORWARD, FORWARD),
        (FORWARD, GATHER),
        (FORWARD, WAIT),
        (FORWARD, GATHER),
        (FORWARD, FORWARD),
        (BACKWARD, BACKWARD),
    ]
