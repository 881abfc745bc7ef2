"""Predictions by hand, bytes as the estimate has them, and the search against all predictions one by one.

With `config="auto"` the ranks that are there are measured, and the model trains with what is found."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.utils.data import TensorDataset

import zeroshard
from tests.commands import failure, shown
from tests.planning import models
from tests.ranks import on_ranks
from zeroshard.memory.activations import loss_of_tokens
from zeroshard.planning import machine
from zeroshard.planning import search as planning
from zeroshard.planning.machine import CLUSTERS, Cluster, Machine, read_cluster
from zeroshard.planning.predict import Predictor
from zeroshard.planning.profile import Subject, UnitProfiles, profile_of
from zeroshard.planning.search import divisions, explain, search, table
from zeroshard.planning.timeline import RECOMPUTES, TIERS, Choice
from zeroshard.tables import draw

LENGTH = 64
GPU = Machine(
    device="a GPU",
    num_devices=4,
    device_bytes=1 << 30,
    host_bytes=1 << 34,
    flops={"float32": 1e12, "bfloat16": 4e12},
    bandwidth=1e11,
    to_host=1e10,
    from_host=1e10,
)
FOUR = Cluster(name="four", machine=GPU, num_ranks=4, ranks_per_node=4, network=5e9, latency=1e-5)


def llama(vocabulary: int = 8192) -> nn.Module:
    with torch.device("meta"):
        return models.llama(vocabulary=vocabulary)


def predictor(cluster: Cluster = FOUR, samples: int = 16, vocabulary: int = 8192) -> Predictor:
    subject = Subject(llama(vocabulary), lambda num: loss_of_tokens((num, LENGTH)))
    return Predictor(subject, cluster, samples)


def profiles(seconds: Sequence[float], made: float = 4096) -> UnitProfiles:
    """Units whose backwards take twice as long as their forwards; the root takes no time."""
    forward = np.array([0.0, *seconds])
    nothing, names = 0 * forward, ["", *(str(number) for number in range(len(seconds)))]
    held = np.full(len(forward), made)
    return UnitProfiles(names, forward, 2 * forward, held, held, nothing, nothing, 1e9 * forward)


@pytest.fixture(scope="module")
def four() -> Predictor:
    return predictor()


# ---------------------------------------------------------------------------------------------- seconds


def linears() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))


def of_linears(cluster: Cluster, seconds: float) -> Predictor:
    """Three units; a forward of each takes so long, and its backward twice that."""
    own = profiles([seconds] * 3)
    machine = replace(cluster.machine, bandwidth=float("inf"))  # nothing but compute and exchanges takes time
    cluster = replace(cluster, machine=machine, latency=0.0)
    return Predictor(Subject(linears(), lambda _: _no_loss), cluster, 4, {1: {1: own, 2: own}})


def _no_loss(model: nn.Module) -> torch.Tensor:
    return model(torch.zeros(1, 1024)).sum()


BYTES = 3 / 4 * 4 * 1024**2
"""That each of four ranks sends to gather a unit, or to reduce its gradient."""


@pytest.mark.parametrize(
    ("stage", "network", "expected"),
    [
        # Exchanges are quick: the first gather, compute, and the last reduction are left.
        (3, 100, lambda x: 9 + 2 * x),
        # At stage 0 a reduction and a gather of its sum follow the last backward.
        (0, 100, lambda x: 9 + 2 * x),
        # Exchanges are slow: 3 gathers, 2 more in the backward, for the last unit is kept, and 3 reductions.
        (3, 0.1, lambda x: 8 * x),
    ],
)
def test_a_step_is_what_compute_and_network_take_beside_each_other(stage, network, expected) -> None:
    own = of_linears(replace(FOUR, network=network * BYTES), 1.0)
    found = own(Choice(stage=stage))
    exact = expected(1 / network)
    slack = 4.0 if network < 1 else 0.0  # compute that no exchange hides
    assert exact <= found.seconds <= exact + slack + 1e-9
    assert found.busy["compute"] == pytest.approx(9)
    assert found.bound == ("compute" if network > 1 else "network")


def test_micro_batches_in_the_middle_count_as_often_as_they_are() -> None:
    own = of_linears(replace(FOUR, network=1e30), 1.0)
    for samples in (4, 8, 16, 40):
        own.samples = samples
        found = own(Choice(stage=2))
        assert found.seconds == pytest.approx(9 * samples / 4)
        assert found.busy["compute"] == pytest.approx(9 * samples / 4)


def test_recomputation_adds_a_forward() -> None:
    own = of_linears(replace(FOUR, network=1e30), 1.0)
    assert own(Choice(recompute="unit")).seconds == pytest.approx(12)


def test_ranks_that_share_their_cores_with_exchanges_wait_for_each_of_them() -> None:
    own = of_linears(replace(FOUR, network=BYTES, machine=replace(GPU, device="cpu")), 1.0)
    assert own(Choice(stage=3)).seconds == pytest.approx(9 + 8)


def test_a_pipeline_is_what_its_simulator_says(four: Predictor) -> None:
    """1F1B of equal chunks: (m + p - 1) times a forward and a backward, and the time of messages."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    cluster = replace(FOUR, machine=replace(GPU, bandwidth=float("inf")), network=1e30, latency=0.0)
    own = Predictor(Subject(model, lambda _: _no_loss), cluster, 8, {1: {1: profiles([1.0] * 4, made=0)}})
    found = own(Choice(stage=0, pp=4))
    assert found.seconds == pytest.approx((8 + 4 - 1) * 3)
    assert found.bubble == pytest.approx(3 / 11)
    assert draw(found.spans(), 33).splitlines()[3] == f"rank 3   |   {4 * 'FBBfbb'}      |"


def test_profiles_lie_on_lines_between_those_that_were_measured() -> None:
    one, four = profiles([1.0]), profiles([4.0])
    assert profile_of({1: one, 4: four}, 2).forward.tolist() == pytest.approx([0, 2])
    assert profile_of({1: one, 4: four}, 7).backward.tolist() == pytest.approx([0, 14])
    assert profile_of({1: one, 4: four}, 4).forward.tolist() == pytest.approx([0, 4])
    assert profile_of({2: one}, 6).backward.tolist() == pytest.approx([0, 6])


@pytest.mark.long
def test_a_step_of_seven_billion_parameters_takes_as_long_as_it_was_measured() -> None:
    """The step of one H200 in benchmarks/results/offload_gpu_core.json, from the rates noted there."""
    document = json.loads(Path("benchmarks/results/offload_gpu_core.json").read_text(encoding="utf-8"))
    measured = next(row for row in document["rows"] if row["setting"] == "all on the GPU")
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, vocab_size=32000, use_cache=False
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == measured["num_params"]
    flops = {"bfloat16": 1e12 * document["facts"]["bf16 matmul, TFLOP/s"]}
    machine = replace(CLUSTERS["8xH100"].machine, flops=flops, bandwidth=4e12, device_bytes=141 << 30)
    cluster = replace(CLUSTERS["8xH100"], num_ranks=1, machine=machine)
    precision = {"param_dtype": "bf16", "main_dtype": "bf16"}
    subject = Subject(model, lambda num: loss_of_tokens((num, 2048)), {"precision": precision})
    own = Predictor(subject, cluster, 4)
    found = own(Choice(stage=3, samples=4, recompute="unit", bits=8))
    assert found.seconds == pytest.approx(measured["step_s"], rel=0.07)
    assert found.estimate.peak == pytest.approx(measured["device_peak"], rel=0.05)


# ------------------------------------------------------------------------------------------------ bytes


@pytest.mark.long_where(stage=[1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_are_those_of_the_estimate(four: Predictor, stage: int) -> None:
    model = llama()
    for choice in (
        Choice(stage=stage, samples=2),
        Choice(stage=stage, samples=4, recompute="unit"),
        Choice(stage=stage, samples=1, bits=8, tiers=("cpu", "none")),
        Choice(stage=stage, samples=4, tp=2),
    ):
        expected = zeroshard.estimate(
            model,
            4,
            four.config(choice),
            optimizer_bits=choice.bits,
            num_tokens=(choice.samples, LENGTH),
        )
        found = four.bytes(choice)
        assert found.peak == pytest.approx(expected.peak, rel=0.002)
        assert (found.total, found.host) == (expected.total, expected.host)


@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_a_pipeline_are_those_of_the_estimate_within_three_percent(
    four: Predictor, stage: int
) -> None:
    choice = Choice(stage=stage, pp=2)
    expected = zeroshard.estimate(llama(), 4, four.config(choice))
    found = max(four.states(choice), key=lambda one: one.peak)
    assert (found.parameters, found.gradients, found.optimizer) == (
        *(expected.parameters, expected.gradients, expected.optimizer),
    )
    assert found.peak == pytest.approx(expected.peak, rel=0.03)  # it is gathered in another order


# ----------------------------------------------------------------------------------------------- search


BITS = (32, 8)
OFFERS = tuple(
    (stage, tiers, bits)
    for stage, tiers, bits in itertools.product(range(4), TIERS[:3], BITS)
    if tiers[1] == "none" or stage == 3
)


def everything(own: Predictor) -> list[Choice]:
    """All configurations, made without the search."""
    return [
        replace(division, recompute=recompute, stage=stage, tiers=tiers, bits=bits)
        for division, recompute in itertools.product(divisions(own), RECOMPUTES)
        for stage, tiers, bits in OFFERS
        if division.pp == 1 or recompute != "auto"
    ]


def test_divisions_are_those_of_the_ranks_and_the_samples(four: Predictor) -> None:
    found = [(one.pp, one.tp, one.samples) for one in divisions(four) if one.chunks == 1]
    assert len(found) == len(set(found)) + 2 * len([one for one in set(found) if one[0] > 1])  # schedules
    for pp, tp, samples in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8, 16, 32)):
        exists = 4 % (pp * tp) == 0 and 16 * pp * tp % (4 * samples) == 0
        assert ((pp, tp, samples) in found) == exists


@pytest.mark.long_where(samples=[16])
@pytest.mark.parametrize(
    ("vocabulary", "room", "samples"),
    [(8192, 150 << 20, 4), *itertools.product((8192, 512), (1 << 30, 150 << 20), (16,))],
)
def test_the_search_finds_what_all_predictions_find(vocabulary: int, room: int, samples: int) -> None:
    own = predictor(replace(FOUR, machine=replace(GPU, device_bytes=room)), samples, vocabulary)
    exact: dict[Choice, float] = {}
    for choice in everything(own):
        with contextlib.suppress(ValueError):  # no such schedule
            found = own(choice)
            place = replace(choice, tiers=TIERS[0], recompute="none", bits=32)
            least = own.least(replace(place, stage=0, bits=8))[int(choice.recompute == "unit"), choice.stage]
            assert least <= found.seconds
            if choice.pp > 1:
                assert own.bytes(choice, own.least_held(choice)).peak <= found.estimate.peak
            if own.fits(found.estimate):
                exact[place] = min(found.seconds, exact.get(place, found.seconds))
    with mock.patch.object(own, "step", wraps=own.step) as predicted:
        result = search(own, bits=BITS)
    assert result.num == len(everything(own)) > 4 * predicted.call_count
    assert [one.seconds for one in result.best] == pytest.approx(sorted(exact.values())[:5])
    for one in result.best:
        assert own.fits(one.estimate)
        zeroshard.Config.from_dict(own.config(one.choice))


def test_states_keep_their_bits_unless_others_are_asked_for(four: Predictor) -> None:
    assert {one.choice.bits for one in search(four).best} == {32}
    assert {one.choice.bits for one in search(four, bits=(8, 32)).best} == {8}  # fewer bytes to step
    own = four.on(replace(FOUR, machine=replace(GPU, bandwidth=1e8)))  # the step takes long
    assert any(line.startswith("With an optimizer with 8-bit") for line in explain(own, search(own)))


def test_parts_of_the_root_are_computed_where_a_pipeline_has_them() -> None:
    """A small embedding is no unit; its seconds and bytes are those of the first rank."""
    own, choice = predictor(vocabulary=512), Choice(stage=0, pp=2)
    names = own.profile(1, 1).names
    first, last = ([names[row] for row in rows] for rows in own.cut(choice.pp)[0])
    assert first == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    assert last == ["model.layers.2", "model.layers.3", "model.norm", "lm_head", ""]
    assert own.profile(1, 1).backward[names.index("lm_head")] > 0
    expected = zeroshard.estimate(llama(512), 4, own.config(choice))
    found = max(own.states(choice), key=lambda one: one.peak)
    assert found.parameters == expected.parameters
    whole = 4 * sum(p.numel() for p in own.subject.model.parameters())
    assert sum(one.parameters for one in own.states(choice)) == pytest.approx(whole, rel=1e-3)  # padding


def test_the_best_is_explained_and_drawn(four: Predictor) -> None:
    found = search(four)
    lines = explain(four, found)
    assert lines[0].startswith("Bound by ")
    assert any(line.startswith("The next best takes ") for line in lines)
    long = replace(found.best[0].choice, tp=2, pp=2, tiers=("cpu", "none"), recompute="unit", bits=8)
    shown = table(four, found._replace(best=(found.best[0]._replace(choice=long), *found.best)))
    assert "4 ranks of four, predicted, not measured: best of " in shown
    assert max(map(len, shown.splitlines())) < 80
    assert {len(line) for line in draw(found.best[0].spans(), 50).splitlines()} == {8 + 2 + 50 + 1}


def test_a_faster_network_is_named_where_it_would_change_the_step(four: Predictor) -> None:
    own = four.on(replace(FOUR, network=1e8))
    [line] = [line for line in explain(own, search(own)) if line.startswith("With twice the network")]
    assert "% less" in line


def test_what_cannot_be_planned_is_refused_with_a_remedy(four: Predictor, tmp_path: Path) -> None:
    own = four.on(replace(FOUR, machine=replace(GPU, device_bytes=1 << 20, host_bytes=1 << 20)))
    with pytest.raises(
        ValueError, match=r"no configuration fits into .* take more ranks, or shorter samples"
    ):
        search(own)
    with pytest.raises(ValueError, match="0 samples, 4 ranks, four: no configuration fits"):
        search(predictor(samples=0))
    with pytest.raises(ValueError, match="expected one of 8xH100, 64xH100, 8x4090, 2xCPU, or a file"):
        read_cluster("9xH100")
    with pytest.raises(ValueError, match="expected the key network"):
        Cluster(name="a", machine=GPU, num_ranks=2, ranks_per_node=2)
    with pytest.raises(ValueError, match="expected the key between"):
        replace(CLUSTERS["8xH100"], num_ranks=16)
    file = tmp_path / "machine.json"
    file.write_text('{"device": "cpu"}', encoding="utf-8")
    with pytest.raises(ValueError, match="expected the JSON of `zeroshard doctor --json`"):
        read_cluster(str(file))


# --------------------------------------------------------------------------------------- command line


def test_the_command_prints_the_best_and_writes_a_config_that_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, out = tmp_path / "config.json", tmp_path / "plan.json"
    models.llama(blocks=2).config.to_json_file(model)
    arguments = ("--cluster", "2xCPU", "--tokens", 1024, "--length", 64, "--out", out)
    printed = shown(capsys, "plan", model, *arguments)
    assert "2 ranks of 2xCPU, predicted, not measured" in printed
    assert "Bound by compute" in printed
    zeroshard.Config.from_file(out)
    assert "8-bit states" not in printed.partition("Bound by")[0]
    twice = ("--optimizer-bits", 8, "--optimizer-bits", 32)
    assert "8-bit" in shown(capsys, "plan", model, *arguments, *twice).partition("Bound by")[0]
    code, said = failure(capsys, "plan", model, "--cluster", "2xCPU", "--tokens", 100, "--length", 64)
    assert (code, said) == (2, "zeroshard: --tokens: expected a multiple of --length 64, got 100\n")
    code, said = failure(capsys, "plan", model, "--tokens", 100)
    assert (code, said) == (2, "zeroshard: expected a MODEL with --cluster and --tokens, or --schedule\n")


def test_a_number_stands_for_a_llama_of_about_that_size() -> None:
    from zeroshard.hf.pretrained import build_typical

    for num in (1e9, 7e9):
        found = sum(p.numel() for p in build_typical(int(num)).parameters())
        assert found == pytest.approx(num, rel=0.08)


# ----------------------------------------------------------------------------- the ranks that are there


QUICKLY = mock.patch.multiple(machine, _BYTES=1 << 22, _WIDTHS={"cpu": 64})
SMALL = mock.patch.object(planning, "_WIDTHS", (64, 256))


@on_ranks(2)
@QUICKLY
@SMALL
def test_a_model_trains_with_the_config_that_is_found(num_ranks: int) -> None:
    model = models.llama(blocks=2, width=64, vocabulary=128)
    engine = zeroshard.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "auto").engine
    config = engine.config
    num_data = num_ranks // (config.mesh.tp * config.mesh.pp)
    assert config.mesh.tp == config.mesh.pp == 1  # nobody says that ranks get the same samples
    assert num_data * config.micro_batch_size * config.gradient_accumulation_steps == 8 * num_ranks
    tokens = torch.randint(128, (8, 16))
    losses = [engine.train_batch({"input_ids": tokens}, tokens).item() for _ in range(3)]
    assert losses[2] < losses[0]
    assert all(state["exp_avg"].dtype == torch.float32 for state in engine.optimizer.state.values())


@on_ranks(2)
@QUICKLY
@SMALL
def test_any_model_is_measured_with_its_samples(num_ranks: int) -> None:
    model = nn.Sequential(nn.Linear(8, 32), *(nn.Linear(32, 32) for _ in range(4)))
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 32))
    engine, _, loader, _ = zeroshard.initialize(
        model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), "auto", training_data=data
    )
    assert loader is not None
    inputs, targets = next(iter(loader))
    engine.backward(nn.functional.mse_loss(engine(inputs), targets))
    assert engine.config.mesh.pp == 1


@on_ranks(2)
@QUICKLY
@SMALL
def test_tensor_ranks_are_timed_with_the_samples_of_one_rank(num_ranks: int) -> None:
    model, length = models.llama(blocks=2, width=64, vocabulary=128), 16 + 4 * dist.get_rank()
    tokens = torch.randint(128, (8, length))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    engine, _, loader, _ = zeroshard.initialize(
        model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), "auto", training_data=data
    )
    assert loader is not None
    assert next(iter(loader))["input_ids"].shape[1] == length
    assert engine.config.mesh.pp == 1


@on_ranks(1)
def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="config='auto': expected training_data, whose samples are measured"):
        zeroshard.initialize(nn.Linear(4, 4), None, "auto")
