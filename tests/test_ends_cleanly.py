"""How a run ends: at its last line, with an exception, and when a rank is lost."""

from __future__ import annotations

import re
import signal
import textwrap

import pytest

from tests.endings import Ending, Forks, run

__all__ = ["run"]

MODEL = """
import os, signal, sys, threading, time
import torch, zeroshard
import torch.distributed as dist
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(20, 300), nn.Linear(300, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(300, 300), nn.Tanh()) for _ in range(4))
        self.fails = False

    def forward(self, x):
        x = self.inner(x)
        for number, block in enumerate(self.blocks):
            if self.fails and number == 1:
                raise LookupError("a row is missing")
            x = block(x)
        return self.outer(x)

rank = int(os.environ["RANK"])
model, x, y = Net(), torch.randn(4, 20), torch.randn(4, 5)
"""

TRAIN = """
engine, optimizer, _, _ = zeroshard.initialize(
    model, torch.optim.AdamW, {"stage": STAGE, "watchdog_s": WATCHDOG}, loss_fn=nn.functional.mse_loss
)
for _ in range(3):
    engine.train_batch(x, y)
"""


FAIL = """
model.fails = True
engine.train_batch(x, y)
"""

FAIL_ON_RANK_1 = """
model.fails = rank == 1
engine.train_batch(x, y)
"""

KILL_RANK_1 = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    engine.train_batch(x, y)
"""

TRAIN_ON = """
while True:
    engine.train_batch(x, y)
"""

SLEEP_ON_RANK_1 = """
def get_next_batch():
    time.sleep(60)

def load_ahead():
    time.sleep(60)

if rank == 1:
    threading.Thread(target=load_ahead, name="loader", daemon=True).start()
    get_next_batch()
engine.train_batch(x, y)
"""

LOOP_ON_RANK_1 = """
sys.setswitchinterval(0.005)  # as usual
while rank == 1:
    pass
engine.train_batch(x, y)
"""

SLEEP_IN_FORWARD_ON_RANK_1 = """
if rank == 1:
    model.blocks[2][1].register_forward_pre_hook(lambda *_: time.sleep(60))
engine.train_batch(x, y)
"""

SLEEP_IN_BACKWARD_ON_RANK_1 = """
if rank == 1:
    model.blocks[2][1].register_full_backward_pre_hook(lambda *_: time.sleep(60))
engine.train_batch(x, y)
"""


KILL_RANK_0 = KILL_RANK_1.replace("rank == 1", "rank == 0")

KILL_RANK_1_WHILE_THE_OTHER_IS_BUSY = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""

KILL_RANK_0_WHILE_THE_OTHER_IS_BUSY = KILL_RANK_1_WHILE_THE_OTHER_IS_BUSY.replace("rank == 1", "rank == 0")

EXIT_ON_RANK_1 = """
if rank == 1:
    sys.exit(0)
"""

LEAVE_OUT_A_BATCH_ON_RANK_1 = """
def batches():
    for number in range(6):
        yield (lambda: 1 // 0) if rank == 1 and number == 2 else lambda: (x, y)

for load in batches():
    try:
        batch = load()
    except ZeroDivisionError:
        continue
    engine.train_batch(*batch)
"""

FEWER_BATCHES_ON_RANK_1 = """
for _ in range(6 - rank):
    engine.train_batch(x, y)
"""

FEWER_BATCHES_ON_RANK_1_WHICH_IS_GONE = """
for number in range(6 - rank):
    if number == 5:
        time.sleep(4)
    engine.train_batch(x, y)
"""


GO_ON_ALONE = """
if rank == LONGER:
    time.sleep(4)
"""

CLOSE_AND_LIST_THREADS = """
import threading
from zeroshard.comm import lifecycle
def threads():
    tasks = "/proc/self/task"
    names = [open(f"{tasks}/{task}/comm").read().strip() for task in os.listdir(tasks)]
    print(*names, *[thread.name for thread in threading.enumerate()])
threads()
lifecycle._lifecycle.close()  # what atexit calls
threads()
"""


def script(*parts: str, stage: int = 3, watchdog_s: float = 60.0) -> str:
    text = "".join(textwrap.dedent(part) for part in (MODEL, *parts))
    return text.replace("STAGE", str(stage)).replace("WATCHDOG", str(watchdog_s))


STAGES = (0, 3)


@pytest.mark.long
def test_script_that_simply_ends_exits_with_0_and_says_nothing(run: Forks) -> None:
    endings = run(*[script(TRAIN, stage=stage) for stage in (0, 1, 2, 3)])
    assert [(ending.code, ending.output) for pair in endings for ending in pair] == [(0, "")] * 8


@pytest.mark.long
def test_uncaught_exception_on_all_ranks_is_the_last_thing_said(run: Forks) -> None:
    for pair in run(*[script(TRAIN, FAIL, stage=stage) for stage in (1, 3)]):
        for ending in pair:
            assert (ending.code, ending.last_line) == (1, "LookupError: a row is missing")


@pytest.mark.long
def test_no_thread_of_the_groups_is_left_at_exit(run: Forks) -> None:
    for pair in run(*[script(TRAIN, CLOSE_AND_LIST_THREADS, stage=stage) for stage in (1, 3)]):
        for ending in pair:
            assert ending.code == 0, ending.output
            before, after = (line.split() for line in ending.output.splitlines())
            for thread in ("pt_gloo_runloop", "zeroshard_watchdog"):
                assert thread in before
                assert thread not in after


@pytest.mark.long_where(dead=[0])
@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("kill", "dead"), [(KILL_RANK_1, 1), (KILL_RANK_0, 0)], ids=["rank 1", "rank 0"])
def test_rank_that_is_killed_ends_the_other_with_the_collective(
    run: Forks, kill: str, dead: int, stage: int
) -> None:
    for pair in run(script(TRAIN, kill, stage=stage)):
        waiting, killed = pair[1 - dead], pair[dead]
        assert [waiting.code, killed.code] == [1, -signal.SIGKILL]
        assert waiting.seconds < 20
        assert_gave_up(waiting, rank=1 - dead)
        assert "another rank has failed" in waiting.last_line
        assert f"rank {dead} has exited" in waiting.last_line


@pytest.mark.long
def test_exception_or_exit_of_one_rank_ends_the_other_too(run: Forks) -> None:
    (waiting, failed), (deserted, gone) = run(
        script(TRAIN, FAIL_ON_RANK_1), script(TRAIN, EXIT_ON_RANK_1, TRAIN_ON)
    )
    assert [waiting.code, failed.code, deserted.code, gone.code] == [1, 1, 1, 0]
    assert failed.last_line == "LookupError: a row is missing"
    assert_gave_up(waiting, rank=0)
    assert waiting.last_line.endswith("; rank 1 has exited with LookupError: a row is missing")
    assert_gave_up(deserted, rank=0)
    assert re.search(
        r"; rank 1 has exited\. If .* call this on all ranks, equally often$", deserted.last_line
    )


HAD_FEWER_BATCHES = (
    "has had fewer batches (its data loader is shorter, or it left one out after an exception that it caught)"
)


@pytest.mark.long
@pytest.mark.long_where(part=[FEWER_BATCHES_ON_RANK_1])
@pytest.mark.parametrize(
    "part",
    [LEAVE_OUT_A_BATCH_ON_RANK_1, FEWER_BATCHES_ON_RANK_1, FEWER_BATCHES_ON_RANK_1_WHICH_IS_GONE],
    ids=["left", "fewer", "gone"],
)
def test_rank_that_had_fewer_batches_ends_and_the_others_are_told_why_they_wait(
    run: Forks, part: str
) -> None:
    for waiting, done in run(*[script(TRAIN, part, stage=stage) for stage in STAGES]):
        assert [waiting.code, done.code, done.output] == [1, 0, ""]
        assert waiting.seconds < 20
        assert_gave_up(waiting, rank=0)
        advice = f"rank 1 has exited. If rank 1 is not on its way there, it {HAD_FEWER_BATCHES}"
        assert advice in waiting.last_line


OUTSIDE = "rank 1 is outside of forward, backward and optimizer step since"
PLACES = {
    SLEEP_ON_RANK_1: OUTSIDE,
    SLEEP_IN_BACKWARD_ON_RANK_1: "rank 1 is in the backward of unit 'blocks.2' since",
}
OTHER_PLACES = {
    LOOP_ON_RANK_1: OUTSIDE,
    SLEEP_IN_FORWARD_ON_RANK_1: "rank 1 is in the forward of unit 'blocks.2' since",
}


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(PLACES, id="asleep"),
        pytest.param(OTHER_PLACES, id="in a loop, in a forward", marks=pytest.mark.long),
    ],
)
def test_stuck_rank_is_ended_and_all_tell_where_each_one_was(run: Forks, places: dict[str, str]) -> None:
    endings = run(*[script(TRAIN, part, watchdog_s=2.0) for part in places])
    for (waiting, stuck), place in zip(endings, places.values(), strict=True):
        assert [waiting.code, stuck.code] == [1, 1]
        assert stuck.seconds < 20
        assert "after at most 2 s" in waiting.last_line
        assert_gave_up(waiting, rank=0)
        report = rf"; rank 0 waits in the .*; {re.escape(place)} \d+\.\d s"
        is_outside = "outside" in place
        advice = r"\. If rank 1 is not on its way there, it .*call this on all ranks" if is_outside else "$"
        assert re.search(report + advice, waiting.last_line)
        assert "zeroshard ends rank 1 of 2: rank 0 of 2 gave up in the" in stuck.output
        assert place in stuck.output
    if SLEEP_ON_RANK_1 not in places:
        return
    stacks = endings[0][1].output
    assert "The stacks of its threads, the last call first:" in stacks
    for function in ("get_next_batch", "load_ahead"):  # of the main thread, and of one that loads data
        assert re.search(rf'File ".*", line \d+ in {function}', stacks)


@pytest.mark.long
def test_rank_that_is_killed_ends_another_that_is_busy_with_its_own(run: Forks) -> None:
    first, second = run(
        script(TRAIN, KILL_RANK_1_WHILE_THE_OTHER_IS_BUSY, watchdog_s=2.0),
        script(TRAIN, KILL_RANK_0_WHILE_THE_OTHER_IS_BUSY, watchdog_s=2.0),
    )
    assert [first[0].code, second[1].code] == [1, 1]
    for ending, dead in ((first[0], 1), (second[1], 0)):
        assert ending.seconds < 20
        assert f": rank {dead} is lost since" in ending.output
        assert f"rank {dead} has exited" in ending.output


@pytest.mark.long
def test_rank_that_has_ended_its_script_lets_others_go_on_alone(run: Forks) -> None:
    alone = [GO_ON_ALONE.replace("LONGER", str(rank)) for rank in (0, 1)]
    for pair in run(*[script(TRAIN, part, watchdog_s=2.0) for part in alone]):
        assert [(ending.code, ending.output) for ending in pair] == [(0, "")] * 2


def test_rank_that_never_comes_to_initialize_is_missed_in_our_words(run: Forks) -> None:
    absent = "\nif rank == 1:\n    raise LookupError('no data')\n"
    ((waiting, failed),) = run(script(absent, TRAIN, watchdog_s=2.0))
    assert [waiting.code, failed.code] == [1, 1]
    assert waiting.last_line.startswith("RuntimeError: ")
    assert "rank 0 of 2" in waiting.last_line


def assert_gave_up(ending: Ending, rank: int) -> None:
    """The last line is our error, with the rank, the collective and the unit."""
    collective = r"(all-gather|reduce-scatter of the gradients) of (unit '[^']+'|the root unit)"
    assert re.match(rf"RuntimeError: rank {rank} of 2 gave up in the {collective} after ", ending.last_line)
