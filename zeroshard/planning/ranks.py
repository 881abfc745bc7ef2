"""The ranks that are there as a cluster, measured together with a model: for `config="auto"`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Axis, on_first
from zeroshard.config.sections import Config
from zeroshard.internals import pytree
from zeroshard.internals.nested import find_tensors
from zeroshard.memory.activations import LossOf
from zeroshard.parallel.pipeline.profile import SampleSource, sample_of
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.planning.machine import Cluster, Probes, measure_machine
from zeroshard.planning.predict import Predictor
from zeroshard.planning.profile import Profiles, Subject, UnitProfiles, count_units, time_units
from zeroshard.planning.search import search

SAMPLES_PER_RANK = 8
"""Samples of a step of `config="auto"`, for each rank."""
_ROUNDS = 3
_MEASURED = (1, 2)
"""Samples of the micro-batches that are timed for `config="auto"`."""


class Ranks:
    """All ranks, which time the units of a model and exchange; collective.

    Args:
        world: all ranks.
        subject: the model.
        samples: the samples of a step, of all ranks together.
    """

    def __init__(self, world: Axis, subject: Subject, samples: int) -> None:
        self._world, self._subject, self._samples = world, subject, samples
        self._probes, self._clusters = Probes(world, measure_machine()), list[Cluster]()
        self._runs: dict[int, Callable[[int], Any]] = {}
        self._seconds = defaultdict[tuple[int, int], list[Any]](list)

    def measure(self, tensor: Collection[int], samples: Collection[int]) -> None:
        """Measure once more; what is predicted afterwards is a median.

        Args:
            tensor: the numbers of tensor ranks; layers that cannot be divided so are left out.
            samples: the numbers of samples of a micro-batch.
        """
        self._clusters.append(self._probes.measure())
        for tp in tensor:
            with suppress(ValueError, torch.OutOfMemoryError):  # then nothing is known of it
                if tp not in self._runs:
                    self._runs[tp] = time_units(self._subject, tp, self._world.device)
                for num in samples:
                    self._seconds[tp, num].append(self._runs[tp](num))

    def close(self) -> None:
        """Give the memory of all that was measured back."""
        self._probes.close()
        self._runs.clear()

    def cluster(self) -> Cluster:
        """Return the medians of all rounds."""
        rates = {
            name: statistics.median(getattr(one, name) for one in self._clusters)
            for name in ("network", "between", "latency", "sums")
        }
        return replace(self._clusters[0], **rates)

    def predictor(self) -> Predictor:
        """Return what predicts steps of this model on these ranks."""
        cluster, timed = self.cluster(), defaultdict[int, dict[int, UnitProfiles]](dict)
        for (tp, num), runs in self._seconds.items():
            counted = count_units(self._subject, tp, num, cluster)
            forward, backward = np.median(runs, 0).T
            timed[tp][num] = counted._replace(forward=forward, backward=backward)
        found: Mapping[int, Profiles] | None = dict(timed) if 1 in timed else None  # else it is counted
        return Predictor(self._subject, cluster, self._samples, found)


def choose_config(
    world: Axis,
    model: nn.Module,
    source: SampleSource,
    *,
    bits: int,
    tp_plan: Plan | None,
    most: tuple[int, int],
) -> Config:
    """Return the config whose step is fastest on the ranks that are there; collective.

    Args:
        world: all ranks.
        model: the model; it does not change.
        source: the samples of the training.
        bits: the bits of the states of its optimizer.
        tp_plan: see `plan_division`.
        most: tensor ranks and pipeline ranks, at most.

    Raises:
        ValueError: there is nothing to measure with; or no configuration fits.
    """
    is_known = source.training_data is not None or hasattr(model, "config")
    if not is_known or sample_of(model, source, 1) is None:
        raise ValueError(
            "config='auto': expected training_data, whose samples are measured, or a causal language model "
            "of transformers; `zeroshard plan` and a config need neither"
        )
    subject = Subject(model, lambda num: _loss_of(model, source, num), tp_plan=tp_plan)
    ranks = Ranks(world, subject, SAMPLES_PER_RANK * world.size)
    tensor = [tp for tp in (1, 2, 4, 8) if tp <= most[0] and world.size % tp == 0]
    for _ in range(_ROUNDS):
        ranks.measure(tensor, _MEASURED)

    def best() -> dict[str, Any]:
        predictor = ranks.predictor()
        return predictor.config(search(predictor, bits=(bits,), num_best=1, most=most).best[0].choice)

    ranks.close()
    return Config.parse(on_first(world, "plan of config='auto'", best))


def _loss_of(model: nn.Module, source: SampleSource, num: int) -> LossOf:
    """Return the loss of some samples: the model's own, or the sum of its outputs."""
    batch = sample_of(model, source, num)
    assert batch is not None, "there are samples"
    more = (
        {} if source.training_data is not None else {"labels": batch.named["input_ids"], "use_cache": False}
    )

    def loss_of(runs: nn.Module) -> Tensor:
        device = next(runs.parameters()).device
        args, named = pytree.tree_map_only(
            Tensor, lambda one: one.to(device), (batch.inputs, {**batch.named, **more})
        )
        output = runs(*args, **named)
        own: Tensor | None = getattr(output, "loss", None)
        if own is not None:
            return own
        return torch.stack([one.sum() for one in find_tensors(output)[0] if one.requires_grad]).sum()

    return loss_of
