"""Random schedules that can run, for tests by hypothesis: a topological order, drawn action by action."""

from __future__ import annotations

from hypothesis import strategies as st

from zeroshard.parallel.pipeline.actions import Action, Kind, Schedule

F, B, I, W, R = (  # noqa: E741 (the letters of the notation)
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.INPUT_GRADIENT,
    Kind.WEIGHT_GRADIENT,
    Kind.RECOMPUTE,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Chunks on any rank in any order; backwards whole or in halves; with and without recompute."""
    num_ranks = draw(st.integers(1, 4))
    num_microbatches = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=3))
    placement = draw(st.permutations([*range(num_ranks), *more]))
    last = len(placement) - 1
    left: list[Action] = []
    for chunk in range(len(placement)):
        for microbatch in range(num_microbatches):
            kinds = [F, *draw(st.sampled_from([(B,), (I, W), (R, B), (R, I, W)]))]
            left += [Action(kind, chunk, microbatch) for kind in kinds]
    listed, done = set(left), set()

    def is_ready(action: Action) -> bool:
        kind, chunk, microbatch = action
        if kind is F:
            return chunk == 0 or Action(F, chunk - 1, microbatch) in done
        if Action(F, chunk, microbatch) not in done or kind is R:
            return Action(F, chunk, microbatch) in done
        if kind is W:
            return Action(I, chunk, microbatch) in done
        recompute = Action(R, chunk, microbatch)
        later = {Action(B, chunk + 1, microbatch), Action(I, chunk + 1, microbatch)}
        return (recompute not in listed or recompute in done) and (chunk == last or bool(later & done))

    lists: list[list[Action]] = [[] for _ in range(num_ranks)]
    while left:
        action = draw(st.sampled_from([action for action in left if is_ready(action)]))
        left.remove(action)
        done.add(action)
        lists[placement[action.chunk]].append(action)
    return Schedule(tuple(placement), num_microbatches, tuple(map(tuple, lists)))
