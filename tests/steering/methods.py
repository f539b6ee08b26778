"""Colmena methods that have never heard of slots, as an existing program has them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colmena.models.methods import ExecutableMethod

from tests.steering.standin import HERE


def square(x: float) -> float:
    return x * x


def complain(words: str) -> None:
    raise ValueError(words)


def leave() -> None:
    sys.exit(3)


def nonsense() -> Any:
    return lambda: "cannot be packed"


def weigh(data: bytes) -> int:
    return len(data)


def blow(size: int) -> str:
    return "x" * size


def count(n: int) -> Iterator[int]:
    yield from range(n)


def specification() -> dict[str, Any]:
    """Return the resource specification that the executor was given with this task."""
    return dict(HERE.entry.spec)


class Echo(ExecutableMethod):
    """Runs `echo`, as Colmena's documentation teaches executables."""

    def __init__(self) -> None:
        super().__init__(executable=["echo", "-n"], name="echo")

    def preprocess(self, run_dir: Path, args: tuple[Any], kwargs: dict[str, Any]) -> tuple[list[str], None]:
        return [str(args[0])], None

    def postprocess(self, run_dir: Path) -> str:
        return (run_dir / "colmena.stdout").read_text()
