"""How a run ends: at its last line, with an exception, and when a rank is lost."""

from __future__ import annotations

import re
import signal

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

KILL = "if rank == DEAD: os.kill(os.getpid(), signal.SIGKILL)"
TRAIN_ON = "while True: engine.train_batch(x, y)"

SLEEP = """
def get_next_batch(): time.sleep(60)
def load_ahead(): time.sleep(60)

if rank == 1:
    threading.Thread(target=load_ahead, name="loader", daemon=True).start()
    get_next_batch()
engine.train_batch(x, y)
"""

LOOP = """
sys.setswitchinterval(0.005)  # as usual
while rank == 1:
    pass
engine.train_batch(x, y)
"""

SLEEP_INSIDE = """
if rank == 1:
    model.blocks[2][1].HOOK(lambda *_: time.sleep(60))
engine.train_batch(x, y)
"""

FAIL = "model.fails = rank in FAILING; engine.train_batch(x, y)"

LEAVE_OUT_A_BATCH = """
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

FEWER_BATCHES = """
for number in range(6 - rank):
    time.sleep(LATE if number == 5 else 0)
    engine.train_batch(x, y)
"""

LIST_THREADS = """
from zeroshard.comm import lifecycle
def threads():
    tasks = "/proc/self/task"
    names = [open(f"{tasks}/{task}/comm").read().strip() for task in os.listdir(tasks)]
    print(*names, *[thread.name for thread in threading.enumerate()])
threads()
lifecycle._lifecycle.close()  # what atexit calls
threads()
"""

ABSENT = 'if rank == 1: raise LookupError("no data")'
SOON_S = 45
"""Without a watchdog the ranks end after 60 s and more."""


def script(*parts: str, stage: int = 3, watchdog_s: float = 60.0, **values: object) -> str:
    text = "\n".join((MODEL, *parts))
    for name, value in {"STAGE": stage, "WATCHDOG": watchdog_s, **values}.items():
        text = text.replace(name, str(value))
    return text


@pytest.mark.long
def test_a_script_that_simply_ends_says_nothing_and_leaves_no_thread_of_the_groups(run: Forks) -> None:
    *quiet, listed = run(*[script(TRAIN, stage=stage) for stage in (0, 3)], script(TRAIN, LIST_THREADS))
    assert [(ending.code, ending.output) for pair in quiet for ending in pair] == [(0, "")] * 4
    for ending in listed:
        assert ending.code == 0, ending.output
        before, after = (line.split() for line in ending.output.splitlines())
        for thread in ("pt_gloo_runloop", "zeroshard_watchdog"):
            assert thread in before
            assert thread not in after


def assert_gave_up(ending: Ending, rank: int) -> None:
    """The last line is our error, with the rank, the collective and the unit."""
    collective = r"(all-gather|reduce-scatter of the gradients) of (unit '[^']+'|the root unit)"
    assert re.match(rf"RuntimeError: rank {rank} of 2 gave up in the {collective} after ", ending.last_line)
    assert ending.seconds < SOON_S


def check_killed(pair: tuple[Ending, ...], dead: int = 1) -> None:
    waiting, killed = pair[1 - dead], pair[dead]
    assert [waiting.code, killed.code] == [1, -signal.SIGKILL]
    assert_gave_up(waiting, rank=1 - dead)
    assert "another rank has failed" in waiting.last_line
    assert f"rank {dead} has exited" in waiting.last_line


OUTSIDE = "rank 1 is outside of forward, backward and optimizer step since"


def check_stuck(pair: tuple[Ending, ...], place: str = OUTSIDE) -> None:
    """All tell where each rank was; the stacks of the stuck one are of its main thread, and of a loader's."""
    waiting, stuck = pair
    assert [waiting.code, stuck.code] == [1, 1]
    assert stuck.seconds < SOON_S
    assert "after at most 2 s" in waiting.last_line
    assert_gave_up(waiting, rank=0)
    report = rf"; rank 0 waits in the .*; {re.escape(place)} \d+\.\d s"
    advice = r"\. If rank 1 is not on its way there, it .*call this on all ranks" if place == OUTSIDE else "$"
    assert re.search(report + advice, waiting.last_line)
    assert "zeroshard ends rank 1 of 2: rank 0 of 2 gave up in the" in stuck.output
    assert place in stuck.output
    assert "The stacks of its threads, the last call first:" in stuck.output


def test_a_rank_that_is_killed_or_stuck_ends_the_other_with_the_reason(run: Forks) -> None:
    """Both at once: the other rank of each run waits for its watchdog."""
    killed, asleep = run(script(TRAIN, KILL, TRAIN_ON, DEAD=1), script(TRAIN, SLEEP, watchdog_s=2.0))
    check_killed(killed)
    check_stuck(asleep)
    for function in ("get_next_batch", "load_ahead"):
        assert re.search(rf'File ".*", line \d+ in {function}', asleep[1].output)


@pytest.mark.long
def test_the_same_holds_for_other_ranks_stages_and_places(run: Forks) -> None:
    kills = [script(TRAIN, KILL, TRAIN_ON, stage=3 * (1 - dead), DEAD=dead) for dead in (0, 1)]
    for dead, pair in enumerate(run(*kills)):
        check_killed(pair, dead)
    busy = run(*[script(TRAIN, KILL, "time.sleep(60)", watchdog_s=2.0, DEAD=dead) for dead in (0, 1)])
    for dead, pair in enumerate(busy):
        ending = pair[1 - dead]
        assert ending.code == 1
        assert ending.seconds < SOON_S
        assert f": rank {dead} is lost since" in ending.output
        assert f"rank {dead} has exited" in ending.output
    inside = "rank 1 is in the {} of unit 'blocks.2' since"
    hooks = {"forward": "register_forward_pre_hook", "backward": "register_full_backward_pre_hook"}
    places = {script(TRAIN, LOOP, watchdog_s=2.0): OUTSIDE}
    for what, hook in hooks.items():
        places[script(TRAIN, SLEEP_INSIDE, watchdog_s=2.0, HOOK=hook)] = inside.format(what)
    *stuck, (waits, failed) = run(*places, script(ABSENT, TRAIN, watchdog_s=2.0))
    for place, pair in zip(places.values(), stuck, strict=True):
        check_stuck(pair, place)
    assert [waits.code, failed.code] == [1, 1]
    assert waits.last_line.startswith("RuntimeError: ")
    assert "rank 0 of 2" in waits.last_line


@pytest.mark.long
def test_exceptions_and_exits_end_all_ranks_and_the_exception_is_the_last_thing_said(run: Forks) -> None:
    both, (waiting, failed), (deserted, gone) = run(
        script(TRAIN, FAIL, FAILING=(0, 1)),
        script(TRAIN, FAIL, FAILING=(1,)),
        script(TRAIN, "sys.exit(0) if rank == 1 else None", TRAIN_ON),
    )
    for ending in (*both, failed):
        assert (ending.code, ending.last_line) == (1, "LookupError: a row is missing")
    assert [waiting.code, deserted.code, gone.code] == [1, 1, 0]
    assert_gave_up(waiting, rank=0)
    assert waiting.last_line.endswith("; rank 1 has exited with LookupError: a row is missing")
    assert_gave_up(deserted, rank=0)
    told = r"; rank 1 has exited\. If .* call this on all ranks, equally often$"
    assert re.search(told, deserted.last_line)


@pytest.mark.long
def test_a_rank_that_had_fewer_batches_ends_and_the_others_are_told_why_they_wait(run: Forks) -> None:
    parts = [(LEAVE_OUT_A_BATCH, 3, 0), (FEWER_BATCHES, 3, 0), (FEWER_BATCHES, 3, 4), (FEWER_BATCHES, 0, 0)]
    scripts = [script(TRAIN, part, stage=stage, LATE=late) for part, stage, late in parts]
    for waiting, done in run(*scripts):
        assert [waiting.code, done.code, done.output] == [1, 0, ""]
        assert_gave_up(waiting, rank=0)
        assert (
            "rank 1 has exited. If rank 1 is not on its way there, it has had fewer batches (its data loader "
            "is shorter, or it left one out after an exception that it caught)"
        ) in waiting.last_line


@pytest.mark.long
def test_a_rank_that_has_ended_its_script_lets_others_go_on_alone(run: Forks) -> None:
    alone = [f"time.sleep(4) if rank == {rank} else None" for rank in (0, 1)]
    for pair in run(*[script(TRAIN, part, watchdog_s=2.0) for part in alone]):
        assert [(ending.code, ending.output) for ending in pair] == [(0, "")] * 2
