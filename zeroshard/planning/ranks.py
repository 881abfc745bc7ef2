"""The ranks that are there as a cluster, measured together with a model: for `config="auto"`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from zeroshard.comm.device import use_device
from zeroshard.comm.lifecycle import start_world
from zeroshard.config.sections import Config
from zeroshard.memory.activations import loss_of_tokens
from zeroshard.memory.estimate import setting_of
from zeroshard.planning.machine import Cluster, Probes, measure_machine
from zeroshard.planning.predict import Predictor
from zeroshard.planning.profile import UnitProfile, count_units, time_units


class Ranks:
    """All ranks, which measure the units of a model and their own exchanges; collective.

    Args:
        model: a causal language model of transformers.
        samples: the samples of a step, of all ranks together.
        length: the tokens of a sample.
    """

    def __init__(self, model: nn.Module, samples: int, length: int) -> None:
        self._model, self._samples, self._length = model, samples, length
        self._device = use_device(None)
        self._world = start_world(self._device, 600.0)
        self._machine = measure_machine()
        self._probes = Probes(self._world, self._machine)
        self._clusters: list[Cluster] = []
        self._runs: dict[int, Any] = {}
        self._seconds: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self._counted: dict[tuple[int, int], list[UnitProfile]] = {}

    def measure(self, tensor: Sequence[int], samples: Sequence[int]) -> None:
        """Measure once more; what is predicted afterwards is a median."""
        self._clusters.append(self._probes.measure())
        for tp in tensor:
            config = Config.parse({"mesh": {"tp": tp}})
            setting = setting_of(config, tp, host_computes=self._clusters[0].shares_cores)
            if tp not in self._runs:
                self._runs[tp] = time_units(self._model, config, setting, self._device)
            for num in samples:
                loss_of = loss_of_tokens((num, self._length))
                self._world.all_gather_object(None, "begin of a measured run")
                self._seconds[tp, num].append(self._runs[tp](loss_of))
                if (tp, num) not in self._counted:
                    self._counted[tp, num] = count_units(
                        self._model, config, setting, loss_of, self._clusters[0]
                    )

    def cluster(self) -> Cluster:
        names = ("network", "between", "latency", "sums")
        if not self._clusters:
            return self._probes.measure()
        machine = replace(
            self._machine, bandwidth=statistics.median(one.machine.bandwidth for one in self._clusters)
        )
        values = {name: statistics.median(getattr(one, name) for one in self._clusters) for name in names}
        return replace(self._clusters[0], machine=machine, **values)

    def describe(self) -> dict[str, Any]:
        return asdict(self.cluster())

    def predictor(self) -> Predictor:
        timed: dict[int, dict[int, Sequence[UnitProfile]]] = defaultdict(dict)
        for (tp, num), runs in self._seconds.items():
            units = []
            for unit in self._counted[tp, num]:
                both = [statistics.median(run[unit.name][at] for run in runs) for at in (0, 1)]
                units.append(unit._replace(forward=both[0], backward=both[1]))
            timed[tp][num] = units
        return Predictor(
            self._model,
            self.cluster(),
            self._samples,
            lambda num: loss_of_tokens((num, self._length)),
            timed=timed or None,
        )
