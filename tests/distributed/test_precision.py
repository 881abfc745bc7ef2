"""bf16 compute with fp32 main parameters, against the same written by hand in plain PyTorch."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import (
    STAGES,
    build,
    by_hand,
    differences,
    distance_of_all,
    full_gradients,
    numbers,
    only,
    start,
    token_loss,
    train,
    train_replicated,
    train_sharded,
    unequal,
)

BF16 = {"param_dtype": "bf16"}


def against_hand_written(kind, optimizer, **precision):
    model = build(kind)
    reduce_dtype = torch.bfloat16 if precision else torch.float32
    want = by_hand(model, optimizer, range(8), token_loss, torch.bfloat16, reduce_dtype=reduce_dtype)
    if dist.get_rank():
        want.parameters = {}
    found = []
    for stage in STAGES:
        config = {"stage": stage, "precision": BF16 | precision}
        run = train_sharded(model, optimizer, 8, token_loss, **config)
        names = want.parameters or ()
        found += differences(f"stage {stage}", only(run, names), want)
    return found


@pytest.mark.long_where(kind=["Llama"])
@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("kind", "optimizer"), [("tied GPT", "AdamW"), ("Llama", "SGD")])
def test_bf16_equals_the_hand_written_loop_to_the_bit(ranks, num_ranks, kind, optimizer):
    assert ranks(num_ranks, against_hand_written, kind, optimizer) == [[]] * num_ranks


def test_with_reduce_dtype_bf16_gradients_are_rounded_before_they_are_added(ranks):
    assert ranks(2, against_hand_written, "tied GPT", "SGD", reduce_dtype="bf16") == [[], []]


def far_from_fp32():
    """(losses, parameters) of bf16 compute relative to fp32."""
    model = build("tied GPT")
    want = train_replicated(model, "SGD", 8)
    got = train_sharded(model, "SGD", 8, stage=3, precision=BF16)
    off = max(abs(a - b) / b for a, b in zip(got.losses, want.losses, strict=True))
    return off, distance_of_all(got.parameters, want.parameters) if got.parameters else 0.0


@pytest.mark.long
def test_bf16_stays_close_to_fp32(ranks):
    """bf16 has 8 bits, so a rounding is up to 0.4%."""
    for losses, parameters in ranks(2, far_from_fp32):
        assert 0 < losses <= 0.004
        assert parameters <= 0.004


# ------------------------------------------------------------------------------------------------ dtypes


class Probe(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.full((7,), 1 / 3))
        self.seen = {}

    def forward(self, x, mask, *, options):
        self.seen = {
            "x": x.dtype,
            "mask": mask.dtype,
            "option": options["scale"].dtype,
            "gain": self.gain.dtype,
            "table": self.table.dtype,
        }
        for block in self.blocks:
            x = block(x) * self.gain
        return {"x": x * options["scale"], "mask": mask, "list": [x.sum()]}


def dtypes(stage, **precision):
    torch.manual_seed(0)
    model = Probe()
    engine, optimizer = start(model, stage=stage, precision=precision)
    x, mask = numbers(0, 5, 7), torch.ones(5, dtype=torch.bool)
    out = engine(x, mask, options={"scale": torch.tensor(2.0, dtype=torch.float64)})
    out["x"].float().square().mean().backward()
    grads = {p.grad.dtype for p in engine.parameters()}
    optimizer.step()
    states = {v.dtype for state in optimizer.state.values() for v in state.values() if v.numel() > 1}
    outputs = out["x"].dtype, out["mask"].dtype, out["list"][0].dtype
    main = {p.dtype for p in engine.parameters()}
    whole = {v.dtype for v in engine.full_state_dict().values()}
    table = torch.equal(model.table, torch.full((7,), 1 / 3))
    return model.seen, outputs, main | grads | states | whole, table


@pytest.mark.parametrize("stage", STAGES)
def test_float_inputs_are_cast_and_buffers_and_main_parameters_are_not(ranks, stage):
    for seen, outputs, kept, table in ranks(2, dtypes, stage, **BF16):
        bf16 = torch.bfloat16
        assert seen == {
            "x": bf16, "mask": torch.bool, "option": bf16, "gain": bf16, "table": torch.float32
        }  # fmt: skip
        assert outputs == (bf16, torch.bool, bf16)
        assert kept == {torch.float32}
        assert table


def test_float_outputs_are_cast_to_output_dtype(ranks):
    for _, outputs, kept, _ in ranks(2, dtypes, 3, param_dtype="bf16", output_dtype="fp32"):
        assert outputs == (torch.float32, torch.bool, torch.float32)
        assert kept == {torch.float32}


def test_without_param_dtype_nothing_is_cast(ranks):
    for seen, _, kept, _ in ranks(2, dtypes, 3):
        assert (seen["x"], seen["option"]) == (torch.float32, torch.float64)
        assert kept == {torch.float32}


# ------------------------------------------------------------------------------------ models of other dtypes


def double_loss(model, number):
    return model(numbers(number, 5, 7).double()).square().mean()


def in_double():
    torch.manual_seed(0)
    model, found, kinds = nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 3)).double(), [], set()
    want = train_replicated(model, "AdamW", 4, double_loss)
    for stage in STAGES:
        engine, optimizer = start(copy.deepcopy(model), stage=stage)
        run = train(engine, optimizer, 4, double_loss)
        found += differences(f"stage {stage}", run, want)
        kinds |= {p.dtype for p in engine.parameters()} | {v.dtype for v in run.parameters.values()}
    return found, kinds


def test_an_fp64_model_stays_fp64(ranks):
    assert ranks(2, in_double) == [([], {torch.float64})] * 2


def in_mixed():
    """A bf16 model with fp32 norms: each computes in its own dtype, all main parameters are fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 30).bfloat16(), nn.Tanh(), nn.Linear(30, 3).bfloat16())
    model.gain = nn.Parameter(torch.ones(()))
    found, runs = set(), []

    def loss(net, number):
        return net(numbers(number, 5, 7).bfloat16()).float().square().mean()

    for stage in STAGES:
        engine, optimizer = start(copy.deepcopy(model), stage=stage)
        inside = set()
        engine.module[0].register_forward_pre_hook(lambda m, a, s=inside: s.add(m.weight.dtype))
        runs.append(train(engine, optimizer, 3, loss))
        found |= {("inside", dtype) for dtype in inside} | {("main", p.dtype) for p in engine.parameters()}
    return found, [line for run in runs for line in differences("stages", run, runs[0])]


def test_a_bf16_model_computes_in_bf16_and_gets_fp32_main_parameters(ranks):
    for found, between_stages in ranks(2, in_mixed):
        assert found == {("inside", torch.bfloat16), ("main", torch.float32)}
        assert between_stages == []


def accumulate_bf16():
    """Distance of the sum of 8 micro-batches from the sum of their fp32 gradients taken in fp64."""
    model, found = build("tied GPT"), {}
    for stage in STAGES:
        engine, _ = start(copy.deepcopy(model), stage=stage, precision=BF16)
        total = None
        for number in range(8):
            token_loss(engine, number).backward()
            each = torch.cat([p.grad.double() for p in engine.parameters()])
            total = each if total is None else total + each
            engine.zero_grad()
        for number in range(8):
            with engine.no_sync():
                token_loss(engine, number).backward()
        engine.clip_grad_norm_(1e9)  # reduces what was added up
        deferred = torch.cat([p.grad.double() for p in engine.parameters()])
        engine.zero_grad()
        for number in range(8):
            token_loss(engine, number).backward()
        reduced = torch.cat([p.grad.double() for p in engine.parameters()])
        found[stage] = [((x - total).norm() / total.norm()).item() for x in (deferred, reduced)]
    return found


def test_micro_batches_are_added_in_fp32(ranks):
    """8 additions in bf16 would be off by about 1e-3, in fp32 by less than 1e-6."""
    for num_ranks in (1, 2):
        for found in ranks(num_ranks, accumulate_bf16):
            assert max(off for pair in found.values() for off in pair) <= 1e-6


def rounded_once():
    """Names of gradients that are not the fp32 sums of this rank's micro-batches, rounded to bf16 once."""
    compute = build("tied GPT")
    engine, _ = start(copy.deepcopy(compute), stage=1, precision={**BF16, "reduce_dtype": "bf16"})
    sums = {}
    for parameter in compute.parameters():
        parameter.data = parameter.data.bfloat16()
    for number in range(4):
        with engine.no_sync():
            token_loss(engine, number).backward()
        token_loss(compute, number).backward()
        for name, parameter in compute.named_parameters():
            sums[name] = sums.get(name, 0.0) + parameter.grad.float().flatten()
        compute.zero_grad()
    engine.clip_grad_norm_(1e9)  # reduces what was added up
    found = full_gradients(engine)
    for name, total in sums.items():
        parts = [torch.empty_like(total, dtype=torch.bfloat16) for _ in range(2)]
        dist.all_gather(parts, (total / 2).bfloat16())
        sums[name] = parts[0].float() + parts[1].float()
    return list(unequal("gradients", found, sums))


def test_micro_batches_are_added_in_fp32_and_rounded_once_on_the_wire(ranks):
    assert ranks(2, rounded_once) == [[], []]


def dtype_that_a_batch_norm_gets(stage):
    model = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7))
    engine, _ = start(model, "SGD", stage=stage, units=["BatchNorm1d"], precision={"param_dtype": "bfloat16"})
    seen = []
    engine.module[0].register_forward_hook(lambda module, args, output: output.float())
    engine.module[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    engine(torch.ones(5, 7))
    return seen


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_batch_norm_that_is_a_unit_gets_its_inputs_as_they_are(ranks, num_ranks):
    for stage in range(4):
        assert ranks(num_ranks, dtype_that_a_batch_norm_gets, stage) == [[torch.float32]] * num_ranks
