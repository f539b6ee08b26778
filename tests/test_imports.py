"""Which part of the package may import which: the rules of docs/architecture.md, checked on the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "mdcampaign").rglob("*.py"))

PURE = {"__future__", "bisect", "collections", "csv", "dataclasses", "heapq", "math", "operator", "typing"}
"""All of the standard library that `scheduling` may import: what holds or orders data, and nothing that acts."""

NEVER = {
    "engines": ("mdcampaign.scheduling", "mdcampaign.node", "parsl", "colmena"),
    "node": ("colmena", "mdcampaign.steering", "mdcampaign.ledger"),
    "steering": ("mdcampaign.node", "mdcampaign.scheduling"),
}


def module_of(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


def imports(path: Path, *, for_types_too: bool = True) -> Iterator[str]:
    """Yield the dotted names that a file imports anywhere; of `from a import b` also `a.b` where that is a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[int] = set()
    if not for_types_too:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it leads"
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            whole = len(inner) < len(node.names)
            yield from sorted(inner | ({str(node.module)} if whole else set()))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def files(part: str) -> list[Path]:
    return [path for path in SOURCES if within(module_of(path), f"mdcampaign.{part}")]


@pytest.mark.parametrize("path", files("scheduling"), ids=module_of)
def test_scheduling_is_pure(path: Path) -> None:
    """No clock, no dice, no threads, no log: events in, decisions out."""
    for name in imports(path):
        ours = within(name, "mdcampaign.scheduling") or name == "mdcampaign.errors"
        assert ours or name.partition(".")[0] in PURE, f"{module_of(path)} imports {name}"


@pytest.mark.parametrize("part", NEVER)
def test_no_part_imports_what_it_must_not_know(part: str) -> None:
    assert files(part), f"no files in mdcampaign/{part}"
    for path in files(part):
        for name in imports(path):
            assert not any(within(name, other) for other in NEVER[part]), f"{module_of(path)} imports {name}"


def test_nothing_imports_the_face_of_the_package() -> None:
    for path in SOURCES:
        for name in imports(path):
            assert name not in ("mdcampaign", "mdcampaign.cli"), f"{module_of(path)} imports {name}"


def test_there_are_no_circles() -> None:
    """Imports inside functions count too: they would hide a circle, not break it."""
    arrows = {
        name: {other for other in imports(path, for_types_too=False) if other in MODULES and other != name}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def follow(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in sorted(arrows[name]):
                follow(other, (*way, name))
            done.add(name)

    for name in sorted(arrows):
        follow(name, ())


def test_no_module_is_called_by_a_word_that_says_nothing() -> None:
    assert not {"utils", "util", "helpers", "common", "misc"} & {name.rpartition(".")[2] for name in MODULES}
