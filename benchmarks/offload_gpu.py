"""Llama shapes on one GPU: states and parameters on the host, next to all on the GPU and next to peers.

    python benchmarks/offload_gpu.py --part core       (at most 5 minutes; 80 GB of GPU, 128 GB of host)
    python benchmarks/offload_gpu.py --part compile    (units are compiled)
    python benchmarks/offload_gpu.py --part sweep      (4k, 8k and 32k tokens a step; 24B clipped)
    python benchmarks/offload_gpu.py --part peers      (after: pip install torchao deepspeed)
    python benchmarks/offload_gpu.py --part core --redraw                                 (without a GPU)
    python benchmarks/offload_gpu.py --part core --device cpu --size tiny --sequence 32   (tries the code)

Each section is a process with its own limit of time. `benchmarks/results/offload_gpu_PART.json` is written
after each one, so a section that fails or takes too long is named there, and no other is lost. `--redraw`
makes the table and the picture of that file.

Main parameters are bf16, states have 8 bits, and units are recomputed. In "peers" main parameters and states
are fp32, as not all peers have others, and all engines compute in bf16, with AdamW. FSDP2, torchao and
DeepSpeed step on the CPU; their bytes on the host are not counted.

TFLOP/s count 6 operations for each token and each parameter of the blocks and the head, and causal attention;
operations of the recomputation are not counted. A time is a median of steps after `WARMUP`. The peak of the
host is read between a backward and its step, and after the step. Estimates are `zeroshard.estimate`'s: on a
GPU they have neither what the allocator keeps nor what kernels need.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import record
import tables
import zeroshard
from documents import read
from engines import Step, engine_step, torch_step
from launch import end_rank
from medians import median_of
from model import build_llama
from offload_fit import BF16, GIGABYTE, SETTINGS
from turns import seconds_of

SHAPES = {
    # name: hidden, intermediate, layers, heads
    "tiny": (64, 176, 2, 4),
    "1B": (2048, 5504, 20, 16),
    "3B": (3072, 8192, 26, 24),
    "7B": (4096, 11008, 32, 32),
    "13B": (5120, 13824, 40, 40),
    "24B": (6656, 17920, 44, 52),
}
VOCABULARY = 32000
LR = 1e-5
WARMUP = 2
"""Untimed steps: the first one compiles and allocates, the second one reaches the state of the others."""
LONG_ENOUGH = 20.0
"""Seconds of timed steps after which no other begins, if there are two."""
STEPS_OF_BITS = 5
MINUTES = {"core": 4.8, "compile": 5.0, "sweep": 8.0, "peers": 9.0}
"""The most time of the sections of a part together."""

ALL = "all on the GPU"
OFFLOADS: dict[str, dict[str, Any]] = {
    ALL: SETTINGS["A"],
    "states on the host, early": SETTINGS["B"],
    "states on the host, late": {"optimizer": "cpu"},
    "parameters on the host, too": SETTINGS["C"],
}
"""`Config.offload`; "early" is `step_in_backward`."""


# ------------------------------------------------------------------------------------ models and engines


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the benchmark with a process of its own."""

    name: str
    """The setting, for tables."""
    size: str = "7B"
    """Of `SHAPES`."""
    batch: int = 4
    """Sequences in a step."""
    limit_s: float = 90.0
    """Seconds of its process, imports included."""
    offload: dict[str, Any] = field(default_factory=dict)
    """`Config.offload`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further keys of `Config`."""
    is_wide: bool = False
    """True for main parameters and states in fp32."""
    build: Callable[[Section, argparse.Namespace], tuple[Step, Any]] | None = None
    """Builds an engine, which is None for a peer; None for zeroshard."""
    measure: Callable[[Section, argparse.Namespace], dict[str, Any]] | None = None
    """For sections that give facts in place of a row of the table."""


def llama(section: Section, args: argparse.Namespace, device: str) -> LlamaForCausalLM:
    """Build the model of a section, in the dtype of its main parameters; a peer's recomputes its layers."""
    hidden, intermediate, layers, heads = SHAPES[section.size]
    sizes = {"head": hidden // heads, "vocabulary": VOCABULARY, "length": args.sequence}
    torch.set_default_dtype(torch.float32 if section.is_wide else torch.bfloat16)
    try:
        with torch.device(device):
            model = build_llama(hidden, layers, intermediate_size=intermediate, **sizes).train()
    finally:
        torch.set_default_dtype(torch.float32)
    if section.build is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def config_of(section: Section) -> dict[str, Any]:
    """The config of a section of zeroshard."""
    precision = {"param_dtype": "bf16"} if section.is_wide else BF16
    given = {"precision": precision, "offload": section.offload, **section.config}
    return {"stage": 3, "recompute": "unit", "units": ["LlamaDecoderLayer"], **given}


def build_zeroshard(section: Section, args: argparse.Namespace) -> tuple[Step, Any]:
    """Build an engine of zeroshard; return its step and itself."""

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if section.is_wide:
            return torch.optim.AdamW(parameters, lr=LR, fused=True)
        return zeroshard.optim.AdamW8bit(parameters, lr=LR)

    model, config = llama(section, args, args.device), config_of(section) | {"device": args.device}
    engine = zeroshard.initialize(model, optimizer, config).engine
    return engine_step(engine, loss_of), engine


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """The loss of a model of transformers."""
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def build_fsdp2(section: Section, args: argparse.Namespace) -> tuple[Step, Any]:
    """torch `fully_shard` with parameters, gradients and optimizer on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    mesh, model = init_device_mesh(args.device, (1,)), llama(section, args, args.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=args.device == "cuda")
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return torch_step(model, optimizer, loss_of=loss_of), None


def build_torchao(section: Section, args: argparse.Namespace) -> tuple[Step, Any]:
    """torchao's optimizer on the host; parameters and gradients in fp32 are on the GPU."""
    from torchao.optim import CPUOffloadOptimizer

    model = llama(section, args, args.device)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    return torch_step(model, optimizer, torch.autocast(args.device, torch.bfloat16), loss_of), None


def build_deepspeed(section: Section, args: argparse.Namespace) -> tuple[Step, Any]:
    """DeepSpeed at stage 3 with its own CPU Adam, which it compiles at the first start, in minutes."""
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= one_rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    os.environ |= {"DS_ACCELERATOR": args.device}  # read when deepspeed is imported
    import deepspeed

    on_host = {"device": "cpu", "pin_memory": args.device == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": section.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "memory_efficient_linear": False, "offload_optimizer": on_host},
        "gradient_clipping": 0.0,  # its default is 1.0; the others do not clip
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
    }
    model = llama(section, args, args.device)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine_step(engine, loss_of), None


# ---------------------------------------------------------------------------- measured inside of a process


def batches(section: Section, args: argparse.Namespace) -> Iterator[Tensor]:
    """Yield batches of tokens, the same ones in each process."""
    generator = torch.Generator().manual_seed(0)
    while True:
        shape = (section.batch, args.sequence)
        yield torch.randint(VOCABULARY, shape, generator=generator).to(args.device)


def train(section: Section, args: argparse.Namespace) -> dict[str, Any]:
    """Time the steps of an engine, and take the peaks of its memory."""
    start = time.perf_counter()
    step, engine = (section.build or build_zeroshard)(section, args)
    built_s = time.perf_counter() - start
    if args.device == "cuda":
        torch.accelerator.reset_peak_memory_stats()  # the model has been there as a whole
    seconds: list[float] = []
    losses: list[float] = []
    tokens = batches(section, args)
    while is_short(seconds[WARMUP:], args.steps):
        batch = next(tokens)
        seconds.append(seconds_of(lambda batch=batch: losses.append(step(batch).item())))
    return {
        "step_s": median_of(seconds[WARMUP:]).value,
        "build_s": built_s,
        "device_peak": torch.accelerator.max_memory_allocated() if args.device == "cuda" else None,
        "host": host_peak(engine, next(tokens)) if engine is not None else None,
        "losses": losses,
        "seconds": seconds,
    }


def is_short(timed: list[float], most: int) -> bool:
    """True if another step is to be timed."""
    return len(timed) < 2 or (len(timed) < most and sum(timed) < LONG_ENOUGH)


def host_peak(engine: zeroshard.Engine, batch: Tensor) -> int:
    """Take one more step; return the most bytes of model states on the host."""
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    waiting = engine.memory_report().host
    engine.step()
    return max(waiting, engine.memory_report().host)


def rates(section: Section, args: argparse.Namespace) -> dict[str, Any]:
    """Rates of the machine: copies of pinned memory over the link, and a product of matrices."""
    on_gpu = args.device == "cuda"
    num_bytes, width = (1 << 30, 8192) if on_gpu else (1 << 22, 256)

    def stream() -> AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext()

    def memory(place: str) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=place, pin_memory=on_gpu and place == "cpu")

    above, below = [memory(args.device) for _ in range(2)], [memory("cpu") for _ in range(2)]
    streams = stream(), stream()

    def up() -> None:
        above[0].copy_(below[0], non_blocking=True)

    def down() -> None:
        below[1].copy_(above[1], non_blocking=True)

    def both() -> None:
        for one, move in zip(streams, (up, down), strict=True):
            with one:
                move()

    def rate(work: float, call: Callable[[], object]) -> float:
        return round(work / median_of([seconds_of(call) for _ in range(6)][1:]).value, 1)

    matrix = torch.randn(width, width, device=args.device, dtype=torch.bfloat16)
    moves = {"link up": up, "link down": down, "both ways at once, each": both}
    found = {f"{title}, GB/s": rate(num_bytes / GIGABYTE, move) for title, move in moves.items()}
    return found | {"bf16 matmul, TFLOP/s": rate(2 * width**3 / 1e12, lambda: matrix @ matrix)}


def same_bits(section: Section, args: argparse.Namespace) -> dict[str, Any]:
    """Compare losses and all parameters after some steps with those of all on the GPU, to the bit.

    A backward of attention adds up in any order, unless algorithms are to be deterministic.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    found: dict[str, Any] = {}
    expected: tuple[list[float], dict[str, Tensor]] | None = None
    for name, offload in [*OFFLOADS.items(), (f"{ALL}, again", OFFLOADS[ALL])]:
        step, engine = build_zeroshard(replace(section, offload=offload), args)
        losses = [
            step(batch).item() for _, batch in zip(range(STEPS_OF_BITS), batches(section, args), strict=False)
        ]
        values = {key: value.clone() for key, value in engine.full_state_dict().items()}
        engine.close(restore=False)
        if expected is None:
            expected = losses, values
            continue
        title = f"{section.size} after {STEPS_OF_BITS} steps, {name}"
        equal = (torch.equal(value, expected[1][key]) for key, value in values.items())
        found |= {f"{title}, losses": losses == expected[0], f"{title}, parameters": all(equal)}
    return found


# ------------------------------------------------------------------------------------------ parts


def own(names: Iterable[str], **others: Any) -> list[Section]:
    """The sections of zeroshard with some names of `OFFLOADS`."""
    return [Section(name=name, offload=OFFLOADS[name], **others) for name in names]


_, EARLY, LATE, _ = OFFLOADS
WIDE: dict[str, Any] = {"size": "3B", "is_wide": True}
CLIPPED = "states on the host, clipped"
PARTS: dict[str, list[Section]] = {
    "core": [
        Section(name="rates of the machine", measure=rates, limit_s=45),
        *own(OFFLOADS),
        *(replace(one, name=CLIPPED, config={"clip_grad_norm": 1.0}) for one in own([LATE])),
        *own([EARLY], size="24B", limit_s=150),
        Section(name=f"bits after {STEPS_OF_BITS} steps", size="1B", measure=same_bits),
    ],
    "compile": own([ALL, EARLY], config={"compile": True}, limit_s=150),
    "sweep": [
        *(one for batch in (2, 4, 16) for one in own([ALL, EARLY], batch=batch)),
        *(
            replace(one, name=CLIPPED, config={"clip_grad_norm": 1.0})
            for one in own([LATE], size="24B", limit_s=150)
        ),
    ],
    "peers": [
        *own([ALL, EARLY, LATE], **WIDE),
        Section(name="FSDP2, CPUOffloadPolicy", build=build_fsdp2, **WIDE),
        Section(name="torchao, CPUOffloadOptimizer", build=build_torchao, **WIDE),
        Section(name="DeepSpeed, offload_optimizer", build=build_deepspeed, limit_s=240, **WIDE),
    ],
}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=tuple(PARTS), default="core")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", choices=tuple(SHAPES), help="in the place of the size of each section")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=5, help="timed steps at most")
    parser.add_argument("--minutes", type=float, help=f"for all sections; default {MINUTES}")
    parser.add_argument("--name", help="of the JSON file in benchmarks/results; default offload_gpu_PART")
    parser.add_argument("--redraw", action="store_true", help="only the table and the picture of the JSON")
    parser.add_argument("--section", type=int, help=argparse.SUPPRESS)  # of a process
    args = parser.parse_args()
    args.name = args.name or f"offload_gpu_{args.part}"
    args.minutes = args.minutes or MINUTES[args.part]
    return args


def sections_of(args: argparse.Namespace) -> list[Section]:
    """The sections of the part that is asked for, in order."""
    return [replace(one, size=args.size or one.size) for one in PARTS[args.part]]


def in_process(section: Section, args: argparse.Namespace) -> None:
    """Measure a section in this process; its last line of output is JSON."""
    try:
        found = (section.measure or train)(section, args)
    except Exception as error:  # out of memory, a peer that is not installed or does not build
        traceback.print_exc()  # all of it; files of results have no paths
        found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(found))
    end_rank()


def run(number: int, section: Section, args: argparse.Namespace, end: float) -> dict[str, Any]:
    """Measure a section in a process of its own; return what it found, or the reason why it failed.

    Args:
        number: its place in the part.
        end: the end of the part, on the monotonic clock.
    """
    limit_s = min(section.limit_s, end - time.monotonic())
    if limit_s < 10:
        return {"failed": "no time was left"}
    end = time.monotonic() + limit_s
    command = [sys.executable, __file__, *sys.argv[1:], "--section", str(number)]
    # In a session of its own, so that compilers that it starts end with it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        facts = facts_of(section, args)  # computed while it starts
        output, _ = process.communicate(timeout=max(0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return {"failed": f"it took more than {limit_s:.0f} s"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        return {"failed": f"it ended with status {process.returncode}"}
    return facts | json.loads(output.splitlines()[-1])


def facts_of(section: Section, args: argparse.Namespace) -> dict[str, Any]:
    """The facts that follow from a shape: numbers of parameters and operations, estimated bytes."""
    if section.measure is not None:
        return {}
    hidden, _, layers, _ = SHAPES[section.size]
    model, num_tokens = llama(section, args, "meta"), section.batch * args.sequence
    num_params = sum(p.numel() for p in model.parameters())
    num_matmul = num_params - VOCABULARY * hidden  # without the lookup of tokens
    facts = {
        "size": section.size,
        "setting": section.name,
        "num_params": num_params,
        "tokens": num_tokens,
        "flop": num_tokens * (6 * num_matmul + 6 * layers * hidden * args.sequence),
    }
    if section.build is not None:
        return facts

    def loss_of_zeros(runs: nn.Module) -> Tensor:
        return loss_of(runs, torch.zeros(section.batch, args.sequence, dtype=torch.long))

    bits, computes = 32 if section.is_wide else 8, args.device == "cpu"
    try:
        found = zeroshard.estimate(
            model, 1, config_of(section), optimizer_bits=bits, host_computes=computes, loss_of=loss_of_zeros
        )
    except ValueError:  # it runs the model of another version of transformers, whose step may be timed
        traceback.print_exc()
        return facts
    return facts | {"estimated": {"device": found.peak, "host": found.host}}


def measure(args: argparse.Namespace) -> None:
    """Measure all sections, and write the document after each."""
    console = record.console()
    settings = {key: value for key, value in vars(args).items() if key not in ("section", "redraw")}
    end = time.monotonic() + 60 * args.minutes
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for number, section in enumerate(sections_of(args)):
        title = f"{section.size}, {section.name}, {section.batch} x {args.sequence} tokens"
        start = time.monotonic()
        found = run(number, section, args, end)
        if "failed" in found:
            skipped[title] = found["failed"]
        elif section.measure is not None:
            facts |= found
        else:
            rows.append(with_speed(found, rows))
        record.write(args.name, rows, settings=settings, skipped=skipped, facts=facts)
        outcome = found.get("failed") or found.get("step_s") or found
        console.print(f"{title}: {outcome} ({time.monotonic() - start:.0f} s)", markup=False)


def with_speed(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row with its speed, and its share of the speed of all on the GPU, which is before it."""
    speed = row["tokens"] / row["step_s"]
    row |= {"tokens_per_s": speed, "tflop_per_s": row["flop"] / row["step_s"] / 1e12}
    shape = [ALL, *(row[key] for key in ("size", "tokens"))]
    whole = [one for one in (*rows, row) if [one[key] for key in ("setting", "size", "tokens")] == shape]
    return row | {"share": speed / whole[0]["tokens_per_s"] if whole else None}


def show(args: argparse.Namespace) -> None:
    """Print the table of the document, and draw its picture."""
    path, console = record.RESULTS / f"{args.name}.json", record.console()
    document = read(path)
    table = tables.offload_gpu(document)
    print(table.markdown())
    for name, reason in document.skipped.items():
        console.print(f"without {name}: {reason}", markup=False)
    with suppress(ImportError):  # of matplotlib: --redraw draws the picture where it is installed
        import plots

        picture = plots.svg(plots.chart_of(table)).replace("<svg", '<svg style="background: white"', 1)
        path.with_suffix(".svg").write_text(picture, encoding="utf-8")


def main() -> int:
    """Measure a part, be the process of a section, or only show what was measured."""
    args = parse()
    if args.section is not None:
        in_process(sections_of(args)[args.section], args)
    if not args.redraw:
        measure(args)
    show(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
