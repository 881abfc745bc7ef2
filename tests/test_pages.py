"""The pages are true where a program can tell: blocks run; links, tables, messages are looked up.

All blocks of a page run one after another, with the same names, on as many ranks as `PAGES` says.
`tests/given.py` has the names that some pages take as given. A comment before a block of Markdown says more
about it:

    <!-- prints -->                    what rank 0 prints in the Python block before, to the letter
    <!-- prints, with another loss --> the same, where the numbers after "loss" may be others
    <!-- raises ValueError -->         the block ends with this error; the text after it has the message
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import os
import re
import runpy
import shlex
import sys
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.distributed.training import build, token_loss
from tests.given import GIVEN
from tests.ranks import on_ranks
from tools.links import problems
from zeroshard import Config
from zeroshard.cli.main import build_parser
from zeroshard.config.checked import flat
from zeroshard.parallel.pipeline.schedules import build_schedule
from zeroshard.parallel.pipeline.simulate import simulate
from zeroshard.plan.arrangement import Arrangement

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def read(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


TESTED_ELSEWHERE = {"migrating.md", "index.md"}
"""The pages whose blocks other tests run: tests/test_migrating.py, and the example of the README below."""

PAGES = {
    path.name: 4 if path.name == "concepts.md" else 2
    for path in sorted(DOCS.glob("*.md"))
    if "\n```python\n" in read(path) and path.name not in TESTED_ELSEWHERE
}
"""The pages whose Python blocks run, with the number of ranks."""

SLOW = {
    *("data.md", "lora.md", "pipeline_parallel.md", "reference.md", "tensor_parallel.md"),  # transformers
    "integrations.md",  # lightning
    *("asynchronous_pipelines.md", "concepts.md"),  # many engines
    "optimizers.md",  # numba
}
"""The pages that take many seconds: they import transformers, compile, or start many engines: long tests."""


class Block(NamedTuple):
    """A block of code."""

    mark: str
    language: str
    code: str


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order, each with the comment before it."""
    text = read(DOCS / page)
    found = re.findall(r"(?:^<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert text.count("\n```") == 2 * len(found), "each block begins at the begin of a line, and ends"
    return [Block(*parts) for parts in found]


def run_page(page: str, folder: Path) -> list[str]:
    """Run the Python blocks of a page on this rank; return what each of them printed, or its error."""
    names: dict[str, Any] = {"__name__": "__main__"}
    given = GIVEN[page]() if page in GIVEN else itertools.repeat({})
    printed = []
    with contextlib.chdir(folder), mock.patch.dict(os.environ, HOME=str(folder)):  # caches lie in HOME
        for block in blocks(page):
            if block.language != "python":
                continue
            output = io.StringIO()
            with contextlib.redirect_stdout(output), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                names |= next(given)
                error = _run(block, names)
            printed.append((error or output.getvalue()).replace(f"{folder}/", ""))
    return printed


def _run(block: Block, names: dict[str, Any]) -> str | None:
    """Run a block; return the error that it is expected to raise."""
    code = compile(block.code, "<block>", "exec")
    if not block.mark.startswith("raises "):
        exec(code, names)
        return None
    try:
        exec(code, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"expected an error, got none:\n{block.code}")


def expected_of(page: str) -> list[tuple[Block, Block | None]]:
    """The Python blocks, each with the text that it prints or raises, where the page shows it."""
    pairs: list[tuple[Block, Block | None]] = []
    for block in blocks(page):
        if block.language == "python":
            pairs.append((block, None))
        elif block.mark.startswith("prints") or (block.language == "text" and pairs[-1][0].mark):
            pairs[-1] = pairs[-1][0], block
    return pairs


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.long_where(page=sorted(SLOW))
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_and_print_what_it_shows(page: str, ranks: Any, tmp_path: Path) -> None:
    printed = ranks(PAGES[page], run_page, page, tmp_path, timeout=120)[0]
    pairs = expected_of(page)
    assert len(printed) == len(pairs) > 0
    for output, (block, shown) in zip(printed, pairs, strict=True):
        if block.mark.startswith("raises "):
            assert shown is not None, "a block that raises is followed by the message"
            kind = block.mark.removeprefix("raises ")
            assert words(output) == words(f"{kind}: {shown.code}")
        elif shown is not None and shown.mark == "prints, with another loss":
            assert re.sub(r"loss [\d.]+", "loss", output) == re.sub(r"loss [\d.]+", "loss", shown.code)
        elif shown is not None:
            assert output == shown.code


def commands(page: str) -> list[list[str]]:
    """The arguments of each call of the command line in the blocks of a page."""
    code = "".join(block.code for block in blocks(page) if block.language in ("", "sh"))
    lines = code.replace("\\\n", " ").splitlines()
    calls = (re.match(r"(?:\$ |torchrun [^#]*-m )?zeroshard (.*)", line) for line in lines)
    return [shlex.split(call[1].partition(" > ")[0], comments=True) for call in calls if call]


@pytest.mark.parametrize("page", ["../README.md", *sorted(path.name for path in DOCS.glob("*.md"))])
def test_the_commands_of_a_page_exist_with_their_options(page: str) -> None:
    found = commands(page)
    for arguments in found:
        build_parser().parse_args(arguments)  # exits if it does not know one
    assert page != "reference.md" or ["mesh", "--ranks", "4", "--tp", "2"] in found


# -------------------------------------------------------------------------------------------- the messages

MESSAGES = re.findall(r"^### `(.*)`$", read("docs/troubleshooting.md"), re.MULTILINE)


def templates() -> list[str]:
    """All strings of the package, with a NUL in place of each value that is formatted into them."""
    found = []
    for path in sorted((ROOT / "zeroshard").rglob("*.py")):
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(_part(value) for value in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def _part(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else "\0"


def test_each_message_of_the_page_is_one_of_the_package() -> None:
    """An ellipsis stands for a value, or for the end of the message."""
    package = templates()
    unknown = []
    for message in MESSAGES:
        parts = [part for part in re.split(r"\s*…\s*", message) if part]
        pattern = re.compile(r"\s*.*?\0.*?\s*".join(map(re.escape, parts)), re.DOTALL)
        if not any(pattern.search(template) for template in package):
            unknown.append(message)
    assert not unknown
    assert len(set(MESSAGES)) == len(MESSAGES) >= 25


# -------------------------------------------------------------------------------------------- the drawings


@pytest.mark.parametrize("path", sorted((DOCS / "drawings").glob("*.svg")), ids=lambda path: path.stem)
def test_a_drawing_is_shown_has_a_title_and_loads_nothing(path: Path) -> None:
    text = read(path)
    root = ET.fromstring(text)
    name = {"svg": "http://www.w3.org/2000/svg"}
    assert root.findtext("svg:title", "", name)
    assert root.findtext("svg:desc", "", name)
    assert "href" not in text
    assert "url(http" not in text
    assert f"](drawings/{path.name})" in read("docs/concepts.md")


def test_the_drawings_of_1f1b_and_of_the_mesh_are_the_schedule_and_its_groups() -> None:
    svg = "{http://www.w3.org/2000/svg}"
    drawn = [
        (int(group.attrib["data-rank"]), group.attrib["data-action"], float(group.attrib["data-start"]))
        for group in ET.parse(DOCS / "drawings/pipeline_1f1b.svg").iter(f"{svg}g")
    ]
    spans = simulate(build_schedule("1f1b", 4, 6)).spans
    assert drawn == [(rank, str(span.action), span.start) for rank, each in enumerate(spans) for span in each]
    groups: dict[str, list[list[int]]] = {"tp": [], "dp": [], "pp": []}
    for path in ET.parse(DOCS / "drawings/mesh.svg").iter(f"{svg}path"):
        if axis := path.attrib.get("data-axis"):
            groups[axis].append([int(rank) for rank in path.attrib["data-ranks"].split(",")])
    mesh = Arrangement(8, pp=2, tp=2)
    for axis, name in {"tp": "tp", "dp": "dp_shard", "pp": "pp"}.items():
        assert sorted(groups[axis]) == mesh.groups(name)


# ------------------------------------------------------------------------------------------------- the site


def test_the_site_has_all_pages() -> None:
    """`make docs` fails at a page that is in no menu; this test tells so without mkdocs."""
    listed = re.findall(r"^ +- [^:]+: (\w+\.md)", read("mkdocs.yml"), re.MULTILINE)
    outer = set(re.findall(r'\.md": "(\w+\.md)"', read("tools/pages.py")))
    assert "overview.md" in outer
    assert outer <= {*listed}
    assert sorted({*listed} - outer) == sorted(path.name for path in DOCS.glob("*.md"))
    assert len(set(listed)) == len(listed)


def test_the_check_of_a_site_finds_dead_links_and_files_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1> <a href="b.html#here">good</a> <a href="#top">good</a> <a href="c.html">dead</a>'
        '<a href="b.html#there">dead anchor</a> <a href="https://example.org">good</a>'
        '<img src="https://example.org/picture.png">'
    )
    (tmp_path / "b.html").write_text('<h1 id="here">B</h1> <b id="here"></b> <a href="a.html">good</a>')
    assert problems(tmp_path) == [
        "a.html: c.html leads nowhere",
        "a.html: b.html#there: no such anchor",
        "a.html: loads https://example.org/picture.png",
        "b.html: two anchors #here",
    ]


def test_the_page_of_the_api_has_all_public_names() -> None:
    shown = re.findall(r"^::: (zeroshard\.[\w.]+)$", read("docs/api.md"), re.MULTILINE)
    public = {f"zeroshard.{name}" for name in zeroshard.__all__} - {"zeroshard.optim"}
    public |= {f"zeroshard.optim.{name}" for name in zeroshard.optim.__all__}
    assert sorted(shown) == sorted(public)


# ------------------------------------------------------------------------------ links, tables and the README


OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/diary.md"]
CONFIG_ROWS = re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \| ", read("docs/reference.md"), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", read(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", sorted([*OUTSIDE, *DOCS.glob("*.md")]), ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", read(page), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_each_link_of_the_readme_shows_the_path_of_its_file() -> None:
    """On a package index relative links lead nowhere, but their text says where to look."""
    links = re.findall(r"(?<!!)\[([^]]+)\]\(([^)]+)\)", read("README.md"))
    assert links == [(path, target) for path, target in links if path == target.partition("#")[0]] != []


def test_the_table_of_the_config_has_every_key_and_its_default() -> None:
    assert {key: ast.literal_eval(default) for key, default in CONFIG_ROWS} == flat(Config())


def test_the_tables_of_offload_are_those_of_the_estimates() -> None:
    page = read("docs/offload.md")
    computed = runpy.run_path(str(ROOT / "benchmarks/offload_fit.py"))
    for name in ("settings", "bytes"):
        table = page.partition(f"<!-- {name}: ")[2].partition("-->\n")[2].partition("\n<!-- end")[0]
        assert table == computed[f"{name}_table"]()


(README_EXAMPLE,) = re.findall(r"```python\n(.*?)```", read("README.md"), re.DOTALL)


def test_the_home_page_has_the_example_of_the_readme() -> None:
    assert re.findall(r"```python\n(.*?)```", read("docs/index.md"), re.DOTALL) == [README_EXAMPLE]


@on_ranks(2)
def test_the_example_of_the_readme_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    with contextlib.chdir(tmp_path), mock.patch.dict(os.environ, HOME=str(tmp_path)):  # of the cache
        if dist.get_rank() == 0:
            Path("corpus.txt").write_text("Some text of several blocks. " * 200, encoding="utf-8")
        bytes_of = next(GIVEN["data.md"]())["tokenizer"]  # all ranks meet there

        def tokenizer(text: str, return_tensors: str) -> SimpleNamespace:
            return SimpleNamespace(input_ids=torch.tensor([bytes_of.encode(text)]))

        with mock.patch("transformers.AutoTokenizer.from_pretrained", return_value=tokenizer):
            exec(README_EXAMPLE, names)
        assert names["engine"].global_step > 0
        assert 0 < names["loss"].item() < 5
        assert Path("out/config.json").is_file()
        assert list(Path("out").glob("*.safetensors"))


ARCHITECTURE = read("docs/architecture.md")
STOP = re.compile(r"`([\w/]+\.py):\s+([\w.]+)`")
STOPS = re.findall(STOP, ARCHITECTURE)


def defined(path: str) -> set[str]:
    """The functions, classes and methods that a module of the package defines, without importing it."""
    names = set()
    for node in ast.parse(read(f"zeroshard/{path}")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (part.name for part in node.body if isinstance(part, ast.FunctionDef))
            names.update(f"{node.name}.{method}" for method in methods)
    return names


def test_all_functions_that_the_architecture_names_exist() -> None:
    names = {path: defined(path) for path, _ in STOPS}
    assert [(path, name) for path, name in STOPS if name not in names[path]] == []
    assert len(STOPS) == len(re.findall(r"`[\w/]+\.py:\s", ARCHITECTURE)) > 50


WALKS = ("batch", "gradient", "step", "key", "micro-batch")


def walk_of(what: str) -> list[tuple[str, str]]:
    """File and name of the functions in the numbered list of a walk, in its order."""
    section = ARCHITECTURE.partition(f"\n## The walk of a {what}\n")[2].partition("\n## ")[0]
    items = re.findall(r"^\d+\. (?:.+\n)+", section, re.MULTILINE)
    return [stop for item in items for stop in re.findall(STOP, item)]


def calls_of(run: Callable[[], Any]) -> tuple[Any, dict[tuple[str, str], None]]:
    """What a function returns, and the functions of zeroshard that this thread calls, by their first call."""
    found: dict[tuple[str, str], None] = {}
    package = f"{ROOT / 'zeroshard'}/"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            found.setdefault((code.co_filename.removeprefix(package), code.co_qualname))

    sys.setprofile(note)
    try:
        return run(), found
    finally:
        sys.setprofile(None)


def real_walks() -> dict[str, list[tuple[str, str]]]:
    """By walk: what this rank calls. Of stage 3 it is the second batch: the first one plans and allocates."""
    torch.manual_seed(0)
    model = build("GPT")
    optimizer, config = torch.optim.AdamW(model.parameters()), {"stage": 3, "clip_grad_norm": 1.0}
    (engine, *_), key = calls_of(lambda: zeroshard.initialize(model, optimizer, config))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)  # a user's, which is called
    for number in range(2):
        loss, forward = calls_of(partial(token_loss, engine, number))
        _, backward = calls_of(partial(engine.backward, loss))
        _, step = calls_of(engine.step)
    engine.close(restore=False)
    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    pipeline = {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 4}}
    make, loss_fn = partial(torch.optim.SGD, lr=0.1), torch.nn.functional.mse_loss
    engine = zeroshard.initialize(layers, make, pipeline, loss_fn=loss_fn).engine
    _, microbatch = calls_of(partial(engine.train_batch, torch.ones(8, 4), torch.ones(8, 4)))
    engine.close(restore=False)
    return dict(zip(WALKS, map(list, (forward | backward, backward, step, key, microbatch)), strict=True))


def test_the_functions_of_each_walk_run_in_its_order(ranks: Any) -> None:
    """On both ranks, but a pipeline's later ranks receive before they compute. Gathers and reductions that
    end on other threads, or by chance, are in no list."""
    first, second = ranks(2, real_walks, timeout=120)
    assert re.findall(r"^## The walk of a (.*)$", ARCHITECTURE, re.MULTILINE) == [*WALKS]
    for what in WALKS:
        listed = walk_of(what)
        assert 5 < len(listed) == len(set(listed)) <= 30, what
        assert [one for one in first[what] if one in listed] == listed
        assert set(listed) <= set(second[what])
        assert what == "micro-batch" or [one for one in second[what] if one in listed] == listed


def test_the_glossary_has_few_words() -> None:
    glossary = ARCHITECTURE.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \|", glossary, re.MULTILINE)[1:]
    words = [word for row in rows for word in row.split(", ")]
    assert len(words) == len(set(words)) <= 45
