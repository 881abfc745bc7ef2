"""The calls and keys that messages of the package name exist."""

import ast
import functools
import re
from dataclasses import fields
from pathlib import Path

import pytest

import zeroshard
from zeroshard import Config, Engine, Precision

ROOT = Path(__file__).parents[2]
SECTIONS = {name: type(getattr(Config(), name)) for name in ("checkpoint", "loader", "mesh", "offload")}
SECTIONS |= {"pipeline": zeroshard.Pipeline, "precision": Precision}


def text_of(node):
    """A string, or an f-string with {} for its values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(text_of(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)


@functools.cache
def messages():
    """The strings of the package that are no docstrings and no parts of others, with their places."""
    found = []
    for path in sorted((ROOT / "zeroshard").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        left_out = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        left_out |= {id(x) for n in nodes if isinstance(n, ast.JoinedStr) for x in n.values}
        strings = (node for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr))
        found += [
            (f"{path.relative_to(ROOT)}:{node.lineno}", text_of(node))
            for node in strings
            if id(node) not in left_out and " " in text_of(node)
        ]
    return found


def exists(dotted):
    """True for a name below `zeroshard`."""
    place = zeroshard
    for part in dotted.split("."):
        place = getattr(place, part, None)
    return place is not None


def keys(section):
    return {field.name for field in fields(section)}


KINDS = {
    r"\bengine\.(\w+)\(": (lambda name: hasattr(Engine, name), 50),
    r"\bzeroshard\.(?!toml\b)((?:optim\.|data\.)?\w+)": (exists, 25),
    r"\bConfig\((\w+)=": (keys(Config).__contains__, 7),
    r"\bPrecision\((\w+)=": (keys(Precision).__contains__, 1),
    **{
        rf"(?<![\w.]){name}\.(?!toml\b)(\w+)\b(?!\()": (keys(section).__contains__, 0)
        for name, section in SECTIONS.items()
    },
}


@pytest.mark.parametrize("pattern", KINDS)
def test_names_in_messages_exist(pattern):
    is_known, least = KINDS[pattern]
    found = [(place, name) for place, text in messages() for name in re.findall(pattern, text)]
    assert len(found) >= least
    assert [(place, name) for place, name in found if not is_known(name)] == []
