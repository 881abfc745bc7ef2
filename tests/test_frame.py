"""The frame of the code: budgets, imports that point downward, few modules that know torch.distributed."""

from __future__ import annotations

import ast
import functools
import gc
import io
import re
import sys
import threading
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.optim import AdamW

import zeroshard
from tests.distributed.training import build, token_loss
from tests.ranks import Ranks
from zeroshard.config.checked import Checked, flat
from zeroshard.config.sections import Config
from zeroshard.optim import AdamW8bit

ROOT = Path(__file__).parents[1]

# Upper limits. A number falls, in the commit that makes the count fall. It rises only by what a feature was
# granted, in the commit of that feature; every other change that needs more takes it from elsewhere first.
BUDGETS = {
    "lines of code of the package": 24912,
    "statements of the package": 20688,
    "tokens of the package": 246704,
    "lines of code of the core": 7760,
    "statements of the core": 6735,
    "tokens of the core": 72819,
    "lines of code of examples, benchmarks and tools": 7418,
    "lines of the longest file": 600,
    "booleans of the core": 31,
    "class names that are defined twice": 0,
    "modules that one other module imports": 21,
    "functions of a step, two ranks": 128,
    "files of a step, two ranks": 25,
    "files of a step, one rank, offload": 28,
    "words in docs/": 44632,
}

CORE = ("plan", "parameters", "sharding", "stepping", "comm", "full", "stores", "internals", "engine")
PROGRAMS = ("examples", "benchmarks", "tools")

# The layer picture of docs/architecture.md, from the ground up.
LAYERS = (
    {"plan", "config", "codec", "tables", "version", "internals"},
    {"comm", "stores", "lazy", "data", "deepspeed", "safetensors"},
    {"parameters"},
    {"sharding", "agreement"},
    {"stepping", "forwards", "full", "parallel"},
    {"assemble", "averages", "gradient_hooks", "optim", "outer"},
    {"checkpoint", "hf", "memory", "sharded"},
    {"batches", "byname", "planning"},
    {"engine"},
    {"entry", "logs", "profiling"},
    {"cli", "integrations"},
    {"__init__", "__main__"},
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# The one upward import: `Config.from_deepspeed` belongs to the Config, DeepSpeed's keys to a part above it.
# It is in a function, so that nobody loads them who does not ask.
LATE = {("zeroshard/config/sections.py", "deepspeed")}

# The parts that may know the Config: those that define, read or refuse one, that plan and assemble by it, and
# the public top. Others get the few values that they need, or a section, which is data.
CONFIGURED = {
    *("config", "deepspeed", "hf", "gradient_hooks", "outer", "plan", "memory", "planning", "assemble"),
    *("sharded", "engine", "entry", "cli", "integrations", "__init__"),
}

# Functions that the engine takes for its methods name it as their first argument, for the type checker alone.
METHODS = {
    (f"zeroshard/{module}.py", "engine")
    for module in (
        *("averages", "batches", "byname", "sharded", "forwards/methods"),
        *("checkpoint/capture", "checkpoint/load", "hf/live", "memory/report", "parallel/pipeline/cut"),
    )
}

# What of torch.distributed a part may use, besides the type of the mesh that is passed down.
MESH = "torch.distributed.device_mesh.DeviceMesh"
DISTRIBUTED = {
    "comm": ("torch.distributed",),
    "gradient_hooks": ("torch.distributed.ProcessGroup",),
    "checkpoint": ("torch.distributed.checkpoint",),
    "cli": ("torch.distributed.is_backend_available",),
    "parallel": ("torch.distributed.tensor", "torch.distributed.pipelining"),
}


Trees = dict[str, ast.Module]
parsed = functools.cache(ast.parse)


def read(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def modules(folder: str) -> Trees:
    """The syntax trees under a folder of the repository, by path."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): parsed(read(file)) for file in files}


def part_of(path: str) -> str:
    """The part of zeroshard that a module belongs to: zeroshard/comm/mesh.py -> comm."""
    return Path(path).parts[1].removesuffix(".py")


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@functools.cache  # many tests ask
def imported(tree: ast.Module) -> list[str]:
    """Dotted names of all that is imported, wherever in the file: `from a import b` gives a.b."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any(getattr(node, "level", 0) for node in nodes), "expected absolute imports"
    before = [f"{node.module}." if isinstance(node, ast.ImportFrom) else "" for node in nodes]
    return [module + alias.name for module, node in zip(before, nodes, strict=True) for alias in node.names]


def imported_parts(tree: ast.Module) -> set[str]:
    """The parts of zeroshard that a module imports; a public name counts as the package's __init__."""
    names = {f"{name}.__init__".split(".")[1] for name in imported(tree) if is_within(name, "zeroshard")}
    return {name if name in PARTS else "__init__" for name in names}


def level(part: str) -> int:
    return LEVEL.get(part, len(LAYERS))


@functools.cache  # two tests ask
def used(tree: ast.Module) -> list[str]:
    """Dotted names that are imported or stand in expressions, such as torch.distributed.barrier, in full."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    beginnings = {id(node.value) for node in attributes}
    return imported(tree) + [ast.unparse(node) for node in attributes if id(node) not in beginnings]


def uses(trees: Trees) -> Iterator[tuple[str, str]]:
    """The paths of modules, each with a name that it uses."""
    return ((path, name) for path, tree in trees.items() for name in used(tree))


def may_use(part: str, name: str) -> bool:
    return any(is_within(name, own) for own in (MESH, *DISTRIBUTED.get(part, ())))


PARTS = {part_of(str(file.relative_to(ROOT))) for file in (ROOT / "zeroshard").rglob("*.py")}


@pytest.fixture(scope="module")
def trees() -> Iterator[Trees]:
    """Those of zeroshard; they are large, and gone after these tests."""
    yield modules("zeroshard")
    for cached in (parsed, imported, used, docstring_lines, statements):
        cached.cache_clear()


def test_every_module_has_a_place_in_the_layer_picture() -> None:
    assert LEVEL.keys() >= PARTS, "expected a place in LAYERS, and in the picture of docs/architecture.md"


def test_imports_point_downward(trees: Trees) -> None:
    upward = [
        f"{path} imports {part}"
        for path, tree in trees.items()
        for part in imported_parts(tree) - {part_of(path)}
        if level(part) > level(part_of(path)) and (path, part) not in LATE | METHODS
    ]
    assert not upward


def test_imports_upward_are_there_and_do_not_run_with_the_module(trees: Trees) -> None:
    for path, part in LATE | METHODS:
        late = ast.If if (path, part) in METHODS else ast.FunctionDef  # `if TYPE_CHECKING`
        parts = (node.body if isinstance(node, ast.ClassDef) else [node] for node in trees[path].body)
        statements = [node for body in parts for node in body if not isinstance(node, late)]
        assert part in imported_parts(trees[path])
        assert part not in imported_parts(ast.Module(statements, []))


def test_parts_of_one_layer_do_not_import_each_other_in_a_circle(trees: Trees) -> None:
    graph: dict[str, set[str]] = {}
    for path, tree in trees.items():
        late = {part for late_path, part in LATE | METHODS if late_path == path}
        graph.setdefault(part_of(path), set()).update(imported_parts(tree) - {part_of(path)} - late)
    TopologicalSorter(graph).prepare()  # raises a CycleError that names them


def test_only_comm_and_the_wrappers_of_torch_libraries_use_torch_distributed(trees: Trees) -> None:
    of_torch = {one for one in uses(trees) if is_within(one[1], "torch.distributed")}
    assert not {(path, name) for path, name in of_torch if not may_use(part_of(path), name)}


def test_no_part_that_reads_checkpoints_unpickles(trees: Trees) -> None:
    read = {one for one in uses(trees) if part_of(one[0]) in ("checkpoint", "safetensors", "hf", "cli")}
    loads = {"torch.load", "torch.jit.load", "torch.serialization.load"}
    assert not {
        one for one in read if (is_within(one[1], "pickle") and one[1] != "pickle.dumps") or one[1] in loads
    }


KEYS = flat(Config()).keys()
SECTIONS = {name: type(own).__name__ for name, own in vars(Config()).items() if isinstance(own, Checked)}
READ = re.compile(rf"(\w+\.)*_?config\.({'|'.join(vars(Config()))})\b")


def keys_of(tree: ast.Module) -> set[str]:
    """The keys of the Config that may travel through a module: an upper bound, as names stand for objects.

    All keys of a section count if the module names the class of the section, or takes the section, as in
    `config.mesh`, from any object. Another key, such as `stage`, counts if the module names a Config and an
    attribute of the key's name, `x.stage`. A value that is handed on by itself is not followed.
    """
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = attributes | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found = {section for section, kind in SECTIONS.items() if section in attributes or kind in names}
    found |= attributes if names & {"Config", "config"} else set()
    return {key for key in KEYS if key.partition(".")[0] in found}


def test_the_config_stops_at_the_plan(trees: Trees) -> None:
    names = {"zeroshard.Config", "zeroshard.config.sections"}
    names |= {f"zeroshard.config.sections.{name}" for name in ("Config", "GivenConfig")}
    know = {part_of(path) for path, tree in trees.items() if names & {*imported(tree)}}
    assert know | {"config"} == CONFIGURED
    below = {path: tree for path, tree in trees.items() if part_of(path) not in CONFIGURED}
    own = {(path, name) for path, name in uses(below) if not is_within(name, "zeroshard")}
    assert not {(path, name) for path, name in own if READ.match(name)}


def test_a_config_key_travels_through_at_most_20_files(trees: Trees) -> None:
    """Besides those of `config/`, which define and check it."""
    outside = [tree for path, tree in trees.items() if part_of(path) != "config"]
    counts = Counter(key for tree in outside for key in keys_of(tree))
    assert counts.keys() == KEYS
    assert not {key: count for key, count in counts.items() if count > 20}
    assert keys_of(ast.parse("own = part.config.loss")) == {"loss.tiles"}
    assert keys_of(ast.parse("def f(mesh: Mesh): ...")) == {"mesh.pp", "mesh.tp", "mesh.sequence"}
    assert keys_of(ast.parse("Config.parse(given).stage, config")) == {"stage"}
    assert not keys_of(ast.parse("def f(stage, tp): return self.stage, mesh.shape"))


PURE = (
    *("plan/layout", "plan/arrangement", "plan/placement", "parallel/pipeline/asynchronous/ages"),
    *(f"parallel/pipeline/{module}" for module in ("actions", "partition", "schedules", "simulate")),
)


def test_layout_arrangement_and_the_lists_of_pipelines_are_pure(trees: Trees) -> None:
    for module in PURE:
        assert not [name for name in imported(trees[f"zeroshard/{module}.py"]) if is_within(name, "torch")]


MEASURED = {
    "benchmarks/asynchronous_executor.py": {"parallel", "parameters"},
    "benchmarks/asynchronous_methods.py": {"parallel"},
    "benchmarks/budget.py": {"forwards"},
    "benchmarks/pipeline_async.py": {"config", "parallel"},
    "benchmarks/pipeline_clock.py": {"parallel"},
    "benchmarks/pipeline_engines.py": {"parallel"},
    "benchmarks/plan.py": {"comm", "memory", "planning"},
}
"""Parts without public names that a benchmark measures by themselves."""


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_examples_and_benchmarks_use_only_the_public_api(folder: str) -> None:
    private = [
        f"{path} imports {part}"
        for path, tree in modules(folder).items()
        for part in imported_parts(tree) - {"__init__", "data", "integrations", "optim"}
        if part not in MEASURED.get(path, ())
    ]
    assert not private


EXTRAS = ("cli", "data", "deepspeed", "integrations", "logs", "profiling")

# Extras use an engine by its public names alone. They import the ground floor, which knows no engine,
# and the modules that count, plan, read files and keep generators without one: the core has these, too.
BELOW = {"codec", "config", "internals.pytree", "internals.warn", "plan", "tables", "version"}
COUNTING = {
    *(f"checkpoint.{one}" for one in ("capture.KIND", "files", "manifest", "rng", "tensors")),
    *(f"hf.{one}" for one in ("export", "pretrained", "quantize")),
    *(f"parallel.pipeline.{one}" for one in ("actions", "asynchronous.ages", "schedules", "simulate")),
    *("memory", "planning"),
}
PUBLIC = {f"zeroshard.{one}" for name, home in zeroshard._HOMES.items() for one in (name, f"{home}.{name}")}

# Private attributes of NamedTuples and of Lightning, which have no public way to the same.
OF_OTHERS = {"_field_defaults", "_wrap_closure"}


def is_for_extras(part: str, name: str) -> bool:
    is_public = any(is_within(name, own) for own in PUBLIC)
    return is_public or any(is_within(name, f"zeroshard.{own}") for own in {part, *BELOW, *COUNTING})


def private(tree: ast.Module) -> Iterator[str]:
    """Yield the private attributes of other objects that a module uses."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in (node for node in attributes if re.match("_[^_]", node.attr)):
        if ast.unparse(node.value) not in ("self", "cls", "super()") and node.attr not in OF_OTHERS:
            yield ast.unparse(node)


def test_extras_use_the_public_api_and_what_knows_no_engine(trees: Trees) -> None:
    extras = {path: tree for path, tree in trees.items() if part_of(path) in EXTRAS}
    named = {(path, name) for path, name in uses(extras) if is_within(name, "zeroshard")}
    assert not {(path, name) for path, name in named if not is_for_extras(part_of(path), name)}
    assert not {(path, name) for path, tree in extras.items() for name in private(tree)}
    assert [*private(ast.parse("engine._axes.world + self._own"))] == ["engine._axes"]
    for other in ("sharded", "checkpoint.save", "internals.autograd", "parallel.pipeline.training"):
        assert not is_for_extras("cli", f"zeroshard.{other}")


def test_each_package_that_a_module_imports_is_required_or_in_an_extra(trees: Trees) -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    known = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in (*project["dependencies"], *extras)}
    roots = {name.partition(".")[0] for tree in trees.values() for name in imported(tree)}
    # What torch brings for NVIDIA's GPUs.
    assert roots - known - set(sys.stdlib_module_names) - {"zeroshard"} == {"triton"}


# The files that set an attribute `forward`, each with the reason.
SET_FORWARD = {
    "zeroshard/sharding/context.py": "`Changes.around`: one stack of all that lies around a module's forward",
    "zeroshard/parallel/pipeline/traced.py": "torch marks split points there; the marks are undone",
    "zeroshard/sharding/walk.py": "the forward that a call belongs to: an attribute of no module",
}


def sets_forward(tree: ast.Module) -> bool:
    """True if a module sets an attribute `forward`: by a statement, by `setattr` and its like, in `vars`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node.slice, "value", None)
        elif isinstance(node, ast.Call) and len(node.args) == 3:
            name = getattr(node.args[1], "value", None)
        else:
            continue
        if name == "forward":
            return True
    return False


def test_one_place_puts_something_around_a_forward(trees: Trees) -> None:
    assert {path for path, tree in trees.items() if sets_forward(tree)} == SET_FORWARD.keys()
    for text in ("a.b, a.forward = 1, f", "vars(a)['forward'] = f", "setattr(a, 'forward', f)"):
        assert sets_forward(ast.parse(text))
    assert not sets_forward(ast.parse("f = a.forward(vars(b)['forward'])"))


ARCHITECTURE = read("docs/architecture.md")
DRAWN = ("plan", "parameters", "sharding", "stepping", "comm")
"""The folders whose modules the layer picture names; of the others it has one line."""


def test_the_layer_picture_has_every_part_and_every_module_of_the_core(trees: Trees) -> None:
    picture = ARCHITECTURE.partition("\n## Layers\n")[2].partition("```")[2].partition("```")[0]
    drawn, folders = set(), [""]
    for indent, name in re.findall(r"^( +)([\w/]+(?:\.py|/)) ", picture, re.MULTILINE):
        depth = max(0, (len(indent) - 4) // 2)
        folders[depth:] = [folders[depth - 1] + name if depth else name]
        drawn.add(folders[depth])
    core = tuple(f"zeroshard/{folder}/" for folder in DRAWN)
    named = {path for path in trees if path.startswith(core) and not path.endswith("/__init__.py")}
    parts = {part_of(name) for name in drawn if name.startswith("zeroshard/")}
    assert LEVEL.keys() == parts
    assert named == {name for name in drawn if name.startswith(core) and name.endswith(".py")}


def test_the_first_reading_is_short_enough() -> None:
    listed = ARCHITECTURE.partition("\n## The first reading\n")[2].partition("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", listed)
    assert len(files) == len(set(files)) > 12
    assert sum(code_lines(read(f"zeroshard/{file}")) for file in files) < 3000


# ---------------------------------------------------------------------------------------------- the budgets


@functools.cache  # three counts ask for it
def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines of all docstrings of a module."""
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(tree) if isinstance(node, scopes))
    documented = [node for node in nodes if ast.get_docstring(node, False) is not None]
    return {line for node in documented for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}


@functools.cache  # the files of the core are also files of the package
def code_lines(source: str) -> int:
    """The number of lines without blank lines, comments and docstrings."""
    left_out = docstring_lines(parsed(source))
    lines = enumerate(map(str.strip, source.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in left_out for number, line in lines)


@functools.cache
def statements(tree: ast.Module) -> int:
    """The number of statements, those in the body of another one too, without docstrings."""
    left_out = docstring_lines(tree)
    return sum(isinstance(node, ast.stmt) and node.lineno not in left_out for node in ast.walk(tree))


LAYOUT = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


@functools.cache
def tokens(source: str) -> int:
    """The number of Python's tokens, without those of comments, docstrings and layout."""
    left_out = docstring_lines(parsed(source))
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in LAYOUT and token.start[0] not in left_out for token in found)


def size(paths: Iterable[str]) -> dict[str, int]:
    """Lines of code, statements and tokens of some files."""
    sources = list(map(read, paths))
    return {
        "lines of code": sum(map(code_lines, sources)),
        "statements": sum(statements(parsed(source)) for source in sources),
        "tokens": sum(map(tokens, sources)),
    }


def is_boolean(value: ast.expr | None) -> bool:
    """True for an expression that is always a bool: a constant, a comparison, `not`, or a chain of these."""
    if isinstance(value, ast.BoolOp):
        return all(map(is_boolean, value.values))
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.Not)
    return isinstance(value, ast.Compare) or (
        isinstance(value, ast.Constant) and isinstance(value.value, bool)
    )


def says_bool(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "bool"


def own_targets(target: ast.expr, value: ast.expr) -> Iterator[str]:
    """Yield the attributes of `self` that are set to an expression that is a bool: `self.a, b = True, 2`."""
    is_several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    ones, values = (target.elts, value.elts) if is_several else ([target], [value])
    for one, given in zip(ones, values, strict=True):
        if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self" and is_boolean(given):
            yield one.attr


def booleans(tree: ast.Module) -> set[str]:
    """`Class.name` of each boolean attribute, field and property of the classes of a module."""
    found = set()
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(owner):
            names: list[str] = []
            if isinstance(node, ast.FunctionDef) and says_bool(node.returns):
                decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
                names = [node.name] if decorators & {"property", "cached_property"} else []
            elif isinstance(node, ast.AnnAssign) and (says_bool(node.annotation) or is_boolean(node.value)):
                names = [ast.unparse(node.target).removeprefix("self.")]
            elif isinstance(node, ast.Assign):
                names = [name for target in node.targets for name in own_targets(target, node.value)]
            found.update(f"{owner.name}.{name}" for name in names if "." not in name)
    return found


def defined_twice(trees: Trees) -> list[str]:
    """The names of classes that more than one module, or one module twice, defines; `_Name` is `Name`."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    counts = Counter(node.name.lstrip("_") for node in classes)
    return sorted(name for name, count in counts.items() if count > 1)


def module_of(path: str) -> str:
    """zeroshard/comm/mesh.py -> zeroshard.comm.mesh."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def importers(trees: Trees) -> dict[str, set[str]]:
    """The modules that import each module, anywhere in their text."""
    names = {module_of(path) for path in trees}
    found: dict[str, set[str]] = {name: set() for name in names}
    for path, tree in trees.items():
        for name in imported(tree):
            module = name if name in names else name.rpartition(".")[0]
            if module in names and module != module_of(path):
                found[module].add(module_of(path))
    return found


def functions_of_a_step(*, offload: bool) -> set[tuple[str, str]]:
    """File and name of the functions of zeroshard that run, on any thread, from a forward to its step's end.

    The step is the second one of stage 3: the first one plans and allocates. Comprehensions and lambdas do
    not count.
    """
    config: dict[str, Any] = {"offload": {"optimizer": "cpu", "parameters": "cpu"}} if offload else {}
    model, make = build("GPT"), AdamW8bit if offload else AdamW
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<"):
            found.add((code.co_filename, code.co_qualname))

    threading.setprofile(note)  # for threads that start from here on
    gc.disable()  # it may call what waits for the end of an object of an earlier test
    try:
        engine = zeroshard.initialize(model, make(model.parameters(), lr=1e-3), {"stage": 3, **config}).engine
        for number in range(2):
            found.clear()
            sys.setprofile(note if number else None)  # the first one compiles: seconds of notes
            engine.backward(token_loss(engine, number))
            engine.step()
            sys.setprofile(None)
        engine.close(restore=False)
    finally:
        gc.enable()
        sys.setprofile(None)
        threading.setprofile(None)
    return {(file, name) for file, name in found if file.startswith(str(ROOT / "zeroshard"))}


def all_counts(trees: Trees, ranks: Ranks) -> dict[str, int]:
    """The present count of each budget."""
    core = {path: tree for path, tree in trees.items() if part_of(path) in CORE}
    programs = [read(path) for folder in PROGRAMS for path in modules(folder)]
    pages = map(read, (ROOT / "docs").rglob("*.md"))
    counts = {f"{unit} of the package": count for unit, count in size(trees).items()}
    counts |= {f"{unit} of the core": count for unit, count in size(core).items()}
    counts["lines of code of examples, benchmarks and tools"] = sum(map(code_lines, programs))
    files = (file for folder in ("zeroshard", "tests", *PROGRAMS) for file in (ROOT / folder).rglob("*.py"))
    counts["lines of the longest file"] = max(len(read(file).splitlines()) for file in files)
    counts["booleans of the core"] = sum(len(booleans(tree)) for tree in core.values())
    counts["class names that are defined twice"] = len(defined_twice(trees))
    counts["modules that one other module imports"] = sum(len(by) == 1 for by in importers(trees).values())
    step = ranks(2, functions_of_a_step, offload=False)[0]
    offloaded = ranks(1, functions_of_a_step, offload=True)[0]
    counts["functions of a step, two ranks"] = len(step)
    counts["files of a step, two ranks"] = len({file for file, _ in step})
    counts["files of a step, one rank, offload"] = len({file for file, _ in offloaded})
    counts["words in docs/"] = sum(len(page.split()) for page in pages)
    return counts


def test_the_budgets_are_kept(trees: Trees, ranks: Ranks) -> None:
    counts = all_counts(trees, ranks)
    assert counts.keys() == BUDGETS.keys()
    assert not {what: (count, BUDGETS[what]) for what, count in counts.items() if count > BUDGETS[what]}


SAMPLE = '''
"""A module."""

class Sample:
    """A class."""

    is_open: bool = False
    size: int = 0

    def __init__(self) -> None:
        self.is_ready, self.name = size > 3, "a"  # a comment
        self.num = 1
        if self.num: self.is_last = not self.num

    @property
    def is_empty(self) -> bool:
        """Whether it is."""
        return True
'''


def test_the_counters_count_what_their_names_say() -> None:
    tree = ast.parse(SAMPLE)
    assert code_lines(SAMPLE) == 10
    assert statements(tree) == 10
    assert tokens("x = f(1)  # one\n") == 6
    assert booleans(tree) == {f"Sample.{name}" for name in ("is_open", "is_ready", "is_last", "is_empty")}
    assert defined_twice({"a": tree, "b": ast.parse("class _Sample: ...")}) == ["Sample"]
    graph = importers({"zeroshard/a.py": ast.parse("from zeroshard.b import c"), "zeroshard/b.py": tree})
    assert graph == {"zeroshard.a": set(), "zeroshard.b": {"zeroshard.a"}}
