"""The frame that the code stands in: imports point downward, and few modules know torch.distributed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The layer picture of docs/architecture.md, from the ground up.
LAYERS = (
    {"plan", "config", "tables", "version", "internals"},
    {"comm", "tiers", "lazy", "data", "deepspeed", "safetensors"},
    {"parameters"},
    {"sharding", "agreement"},
    {"stepping", "forwards", "guards", "restore", "full", "parallel"},
    {"assemble", "optim"},
    {"checkpoint", "hf", "byname", "memory", "sharded"},
    {"engine", "batches", "checkpointing", "modulelike", "reports"},
    {"averaging", "doctor", "entry", "logs", "profiling", "taking"},
    {"cli", "integrations"},
    {"__init__", "__main__"},
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# The one upward import: `Config.from_deepspeed` belongs to the Config, DeepSpeed's keys to a part above it.
# It is in a function, so that nobody loads them who does not ask.
LATE = {("zeroshard/config/foreign.py", "deepspeed")}

# What of torch.distributed a part may use, besides the type of the mesh that is passed down.
MESH = "torch.distributed.device_mesh.DeviceMesh"
DISTRIBUTED = {
    "comm": ("torch.distributed",),
    "checkpoint": ("torch.distributed.checkpoint",),
    "parallel": ("torch.distributed.tensor", "torch.distributed.pipelining"),
}


def modules(folder: str) -> dict[str, ast.Module]:
    """The syntax trees under a folder of the repository, by path."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def part_of(path: str) -> str:
    """The part of zeroshard that a module belongs to: zeroshard/comm/mesh.py -> comm."""
    return Path(path).parts[1].removesuffix(".py")


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names of all that is imported, wherever in the file: `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: expected an absolute import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_parts(tree: ast.Module) -> set[str]:
    """The parts of zeroshard that a module imports; a public name counts as the package's __init__."""
    names = {f"{name}.__init__".split(".")[1] for name in imported(tree) if is_within(name, "zeroshard")}
    return {name if name in PARTS else "__init__" for name in names}


def level(part: str) -> int:
    return LEVEL.get(part, len(LAYERS))


def used_attributes(tree: ast.Module) -> Iterator[str]:
    """Dotted names in expressions, such as torch.distributed.barrier, in full."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    beginnings = {id(node.value) for node in attributes}
    return (ast.unparse(node) for node in attributes if id(node) not in beginnings)


def may_use(part: str, name: str) -> bool:
    return any(is_within(name, own) for own in (MESH, *DISTRIBUTED.get(part, ())))


Trees = dict[str, ast.Module]
PARTS = {part_of(str(file.relative_to(ROOT))) for file in (ROOT / "zeroshard").rglob("*.py")}


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Those of zeroshard; they are large, and gone after these tests."""
    return modules("zeroshard")


def test_every_module_has_a_place_in_the_layer_picture() -> None:
    assert LEVEL.keys() >= PARTS, "expected a place in LAYERS, and in the picture of docs/architecture.md"


def test_imports_point_downward(trees: Trees) -> None:
    upward = [
        f"{path} imports {part}"
        for path, tree in trees.items()
        for part in imported_parts(tree) - {part_of(path)}
        if level(part) > level(part_of(path)) and (path, part) not in LATE
    ]
    assert not upward


def test_the_one_import_upward_is_there_and_is_late(trees: Trees) -> None:
    for path, part in LATE:
        statements = [node for node in trees[path].body if not isinstance(node, ast.FunctionDef)]
        assert part in imported_parts(trees[path])
        assert part not in imported_parts(ast.Module(statements, []))


def test_parts_of_one_layer_do_not_import_each_other_in_a_circle(trees: Trees) -> None:
    graph: dict[str, set[str]] = {}
    for path, tree in trees.items():
        late = {part for late_path, part in LATE if late_path == path}
        graph.setdefault(part_of(path), set()).update(imported_parts(tree) - {part_of(path)} - late)
    TopologicalSorter(graph).prepare()  # raises a CycleError that names them


def test_only_comm_and_the_wrappers_of_torch_libraries_use_torch_distributed(trees: Trees) -> None:
    used = {
        f"{path} uses {name}"
        for path, tree in trees.items()
        for name in [*imported(tree), *used_attributes(tree)]
        if is_within(name, "torch.distributed") and not may_use(part_of(path), name)
    }
    assert not used


def test_no_part_that_reads_checkpoints_unpickles(trees: Trees) -> None:
    found = {
        f"{path} uses {name}"
        for path, tree in trees.items()
        if part_of(path) in ("checkpoint", "safetensors", "hf", "cli")
        for name in [*imported(tree), *used_attributes(tree)]
        if is_within(name, "pickle") or name in ("torch.load", "torch.jit.load", "torch.serialization.load")
    }
    assert not found


@pytest.mark.parametrize("module", ["layout", "arrangement", "placement"])
def test_layout_and_arrangement_are_pure(module: str, trees: Trees) -> None:
    names = list(imported(trees[f"zeroshard/plan/{module}.py"]))
    assert not [name for name in names if is_within(name, "torch")]


LISTS_OF_PIPELINES = (
    *("actions", "alternating", "check", "costs", "held", "partition", "recompute", "schedules", "sharding"),
    *("simulate", "transfers", "varuna", "zbv"),
)


@pytest.mark.parametrize("module", LISTS_OF_PIPELINES)
def test_the_lists_of_pipelines_are_pure(module: str, trees: Trees) -> None:
    names = list(imported(trees[f"zeroshard/parallel/pipeline/{module}.py"]))
    assert not [name for name in names if is_within(name, "torch")]


MEASURED = {
    ("benchmarks/asynchronous_executor.py", "parallel"),
    ("benchmarks/asynchronous_executor.py", "parameters"),
    ("benchmarks/asynchronous_methods.py", "parallel"),
    ("benchmarks/nvme.py", "tiers"),
    ("benchmarks/offload_timeline.py", "tiers"),
    ("benchmarks/offload_timeline.py", "stepping"),
    ("benchmarks/pipeline_async.py", "config"),
    ("benchmarks/pipeline_async.py", "parallel"),
    ("benchmarks/pipeline_clock.py", "parallel"),
    ("benchmarks/pipeline_engines.py", "parallel"),
}
"""Parts without public names that a benchmark measures by themselves."""


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_examples_and_benchmarks_use_only_the_public_api(folder: str) -> None:
    private = [
        f"{path} imports {part}"
        for path, tree in modules(folder).items()
        for part in imported_parts(tree) - {"__init__", "data", "integrations", "optim"}
        if (path, part) not in MEASURED
    ]
    assert not private
