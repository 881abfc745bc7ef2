"""The settings of a pipeline, with the names of asynchronous methods.

The methods themselves are in `parallel/pipeline/asynchronous/`; this table names the parts of each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from zeroshard.config import checked
from zeroshard.config.checked import Checked, Requirement


class Method(NamedTuple):
    """An asynchronous method."""

    weights: str
    """The weights of forward and backward."""
    correction: str = "none"
    """The correction of the optimizer's step."""


ASYNCHRONOUS: Mapping[str, Method] = {
    "pipedream": Method("stash"),
    "2bw": Method("double"),
    "pipemare": Method("estimate", "rescale"),
    "pb": Method("latest"),
    "spectrain": Method("predict"),
    "lwp": Method("lwp"),
    "paci": Method("bounded"),
}
"""The methods by the names of their schedules."""
_SYNCHRONOUS = Method("latest")

NEWEST_WEIGHTS = ("latest", "bounded")
"""The weights that are the newest ones in forward and backward."""
KEPT_WEIGHTS = ("stash", "vertical", "double")
"""The weights that are the same in forward and backward, since versions are kept."""
MOVED_WEIGHTS = ("estimate", "predict", "lwp", "lwp-weights")
"""The weights that are computed from the newest ones."""
WEIGHTS = ("latest", "stash", "vertical", "double", "estimate", "predict", "lwp", "lwp-weights", "bounded")
NOTED_CHANGES: Mapping[str, str] = {"estimate": "mean_of_changes", "lwp-weights": "last_change"}
"""The states that some weights add to the optimizer's, by the names that checkpoints have."""
_NAMES = ", ".join(ASYNCHRONOUS)
_DECAY = 0.135


@dataclass(frozen=True, kw_only=True)
class Pipeline(Checked):
    """The schedule of a batch over the pipeline-parallel ranks."""

    _prefix = "pipeline."
    schedule: Annotated[str, checked.SCHEDULE] = "1f1b"
    """Order of forwards and backwards: a name, in upper or lower case, or a list of your own.

    A list is a Schedule, its text, or the path of a .csv file that rank 0 reads. The names of asynchronous
    schedules are "pipedream", "2bw", "pipemare", "pb", "spectrain", "lwp" and "paci".
    """
    num_microbatches: Annotated[int, checked.integer(1)] = 1
    """Micro-batches in a rank's batch: of one step, or of several steps of an asynchronous schedule."""
    num_chunks: Annotated[int | None, checked.integer(1)] = None
    """Chunks of the model on each rank. None: the smallest number that the schedule allows."""
    balance: Annotated[str, checked.choice("time", "memory")] = "time"
    """Chunks are cut to have about the same "time", by operations, or parameters ("memory")."""
    split: Annotated[Sequence[str] | None, checked.PATTERNS] = None
    """Names of the blocks that each begin a new chunk, or patterns, in order, without the first block.

    None: the model is cut by `balance`.
    """
    trace: bool = False
    """True: a trace of its forward cuts a model of any structure, before the modules in `split`."""
    microbatches_per_step: Annotated[int | None, checked.integer(1)] = None
    """Micro-batches of each step of an asynchronous schedule. None: the fewest that its weights allow."""
    synchronous_steps: Annotated[int, checked.integer(0)] = 0
    """The first steps of training, which are synchronous although the schedule is not."""
    weights: Annotated[str | None, checked.choice(*WEIGHTS)] = None
    """The weights of forward and backward in an asynchronous schedule. None: the weights of its method.

    "latest", "stash", "vertical", "double", "estimate", "predict", "lwp", "lwp-weights" or "bounded".
    """
    correction: Annotated[str | None, checked.choice("none", "rescale", "spike")] = None
    """The correction of the optimizer's step for stale gradients. None: the correction of the method.

    "rescale" divides the learning rate by the delay in steps, "spike" spreads a late gradient as if it had
    come in time.
    """
    decay: Annotated[float, checked.FRACTION] = _DECAY
    """The decay of the mean of weight changes of "estimate" over the steps that a micro-batch crosses."""
    anneal_steps: Annotated[int | None, checked.integer(1)] = None
    """Steps over which "rescale" goes back to the whole learning rate. None: it never does."""
    max_crossed_steps: Annotated[int, checked.integer(1)] = 1
    """The most steps between forward and backward of a micro-batch that "bounded" allows."""

    def _requirements(self) -> list[Requirement]:
        return [
            (self.balance != "time", "balance", (self.split is None, "split", "None")),
            (self.trace, "trace", (self.split is not None, "split", "names of modules")),
            *self._asynchronous_requirements(),
        ]

    def _asynchronous_requirements(self) -> list[Requirement]:
        is_named = self.schedule in ASYNCHRONOUS
        is_list = "\n" in self.schedule or self.schedule.lower().endswith(".csv")
        named = (is_named, "schedule", f"one of {_NAMES}")
        any_list = (is_named or is_list, "schedule", f"one of {_NAMES}, or a list")
        has_weights = (
            self.weights is not None or not is_list,
            "weights",
            "set, as an asynchronous list needs them",
        )
        needs = "weights" if self.weights is not None or not is_named else "schedule"
        is_other = needs == "weights"
        estimates = (self.chosen_weights == "estimate", needs, "'estimate'" if is_other else "'pipemare'")
        bounds = (self.chosen_weights == "bounded", needs, "'bounded'" if is_other else "'paci'")
        rescales = (self.chosen_correction == "rescale", "correction", "'rescale'")
        return [
            (self.weights is not None, "weights", any_list),
            (self.microbatches_per_step is not None, "microbatches_per_step", named),
            (self.synchronous_steps > 0, "synchronous_steps", named),
            (self.correction is not None, "correction", any_list, has_weights),
            (self.decay != _DECAY, "decay", estimates),
            (self.anneal_steps is not None, "anneal_steps", rescales),
            (self.max_crossed_steps != 1, "max_crossed_steps", bounds),
            (is_named, "schedule", (self.num_chunks in (None, 1), "num_chunks", "None or 1")),
        ]

    @property
    def is_asynchronous(self) -> bool:
        """True if steps are taken while micro-batches are under way."""
        return self.schedule in ASYNCHRONOUS or self.weights is not None

    @property
    def chosen_weights(self) -> str:
        """The weights of forward and backward, by their name in `WEIGHTS`."""
        return self.weights or ASYNCHRONOUS.get(self.schedule, _SYNCHRONOUS).weights

    @property
    def chosen_correction(self) -> str:
        """The correction of steps; "none" for none."""
        return self.correction or ASYNCHRONOUS.get(self.schedule, _SYNCHRONOUS).correction

    def step_size(self, num_ranks: int) -> int:
        """Return the micro-batches of a step of an asynchronous schedule over so many pipeline ranks."""
        if self.microbatches_per_step is not None:
            return self.microbatches_per_step
        if self.chosen_weights == "double":
            return num_ranks
        if self.chosen_weights == "bounded":
            return max(1, math.ceil((num_ranks - 1) / self.max_crossed_steps))
        return 1
