"""What `fusion_p2p` offers is documented: every name, every parameter, the errors, where the meaning comes from; and
every module and every public function of some length in the three rooms says what it is."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fusion_p2p

ROOT = Path(__file__).parents[2]
ERRORS = r"\b(InputError|CaptureError|RunPaused|VolunteerFailed|DiskFull)\b"
SOURCE = r"DESIGN|FusionLLM|torch\.optim|torch\.nn|AdamW and SGD|as of `Run`"


def methods(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    for owner in kind.__mro__[:-1]:
        for attribute, value in vars(owner).items():
            function = getattr(value, "__func__", value)
            function = function.fget if isinstance(function, property) else function
            if not attribute.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{attribute}", function


OFFERED = {name: getattr(fusion_p2p, name) for name in fusion_p2p.__all__}
METHODS = dict(pair for name, value in OFFERED.items() if inspect.isclass(value) for pair in methods(name, value))


@pytest.mark.parametrize("name", [*OFFERED, *METHODS])
def test_every_offered_name_tells_all_its_parameters(name: str) -> None:
    value = (OFFERED | METHODS)[name]
    text = inspect.getdoc(value) or ""
    assert len(text.split()) >= 5, name
    silent = [
        p for p in inspect.signature(value).parameters if p not in ("self", "cls") and not re.search(rf"\b{p}\b", text)
    ]
    assert not silent, f"{name} does not say what {', '.join(silent)} is"


@pytest.mark.parametrize("name", OFFERED)
def test_every_offered_name_tells_its_errors(name: str) -> None:
    assert re.search(ERRORS, inspect.getdoc(OFFERED[name]) or ""), name


@pytest.mark.parametrize("name", [n for n in OFFERED if n not in ("LocalSwarm", "Run")])
def test_what_computes_tells_where_its_meaning_comes_from(name: str) -> None:
    assert re.search(SOURCE, inspect.getdoc(OFFERED[name]) or ""), name


@pytest.mark.parametrize("name", ["capture", "LocalPipeline", "Run"])
def test_what_takes_batches_tells_their_shape(name: str) -> None:
    assert re.search(
        r"\(samples, \.\.\.\)|dimension 0 the samples|structure of the captured", inspect.getdoc(OFFERED[name]) or ""
    )


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


@pytest.mark.parametrize("room", ["fusion_p2p", "dht", "peer"])
def test_every_module_and_every_longer_public_part_says_what_it_is(room: str) -> None:
    silent = []
    for path in sorted((ROOT / room).rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        where = str(path.relative_to(ROOT))
        if tree.body and not ast.get_docstring(tree):
            silent.append(where)
        for node in functions(tree):
            long = (node.end_lineno or 0) - node.lineno >= 5
            if long and not node.name.startswith("_") and not ast.get_docstring(node):
                silent.append(f"{where}:{node.lineno} {node.name}")
    assert not silent
