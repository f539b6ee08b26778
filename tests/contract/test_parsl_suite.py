"""Parsl's own generic executor tests, unchanged, on SlotExecutor.

They need pytest before version 8; it is installed into a directory beside the environment, so that ours stays.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import parsl.tests
import pytest

SUITE = Path(parsl.tests.__file__).parent
CONFIG = Path(__file__).parent / "slots_local.py"
EXPECTED = 143
"""What stock HTEX passes as root; as another user two more, which write where only root may."""

AS_ROOT = ["test_bad_stdout_file", "test_bad_stderr_file"]


@pytest.fixture(scope="session")
def old_pytest() -> Path:
    """A directory with pytest 7 and the pandas that one test imports."""
    target = Path(sys.prefix) / "pytest7"
    if not (target / "pytest").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), "pytest<8", "pandas"]
        subprocess.run(command, check=True, timeout=240)
    return target


@pytest.mark.parsl_suite
@pytest.mark.timeout(600)
def test_parsl_own_suite_passes(old_pytest: Path, tmp_path: Path) -> None:
    deselected = " and ".join(["not cleannet", *(f"not {name}" for name in AS_ROOT if os.geteuid() == 0)])
    done = subprocess.run(
        [sys.executable, *f"-m pytest {SUITE} -p no:cacheprovider -q --config {CONFIG} -k".split(), deselected],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(old_pytest)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    tail = "\n".join(done.stdout.splitlines()[-60:])
    assert done.returncode == 0, tail
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= EXPECTED, tail
