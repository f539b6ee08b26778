"""The arithmetic of the quickstart: basins, first passages, and the rate from censored times."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from pathlib import Path

import pytest

from mdcampaign.steering.queues import PipeQueues

WORKFLOWS = Path(__file__).resolve().parent.parent / "workflows"


@pytest.fixture(scope="module")
def ensemble():
    sys.path.insert(0, str(WORKFLOWS))
    spec = importlib.util.spec_from_file_location("ensemble", WORKFLOWS / "ensemble.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(WORKFLOWS))


def test_first_passage_counts_from_the_first_extended_frame(ensemble) -> None:
    times = [0.0, 1.0, 2.0, 3.0, 4.0]
    phi = [-70.0] * 5
    assert ensemble.first_passage(times, phi, [20.0, 150.0, 100.0, -30.0, -30.0]) == (2.0, True)
    assert ensemble.first_passage(times, phi, [150.0] * 5) == (4.0, False)
    assert ensemble.first_passage(times, phi, [-30.0] * 5) == (0.0, False)


def test_rate_is_right_under_censoring(ensemble) -> None:
    """Exponential passages of mean 50 ps, censored at unequal lengths: the estimate is within three errors."""
    dice = random.Random(3)
    thinker = ensemble.Ensemble(PipeQueues())
    for _ in range(2000):
        passage, limit = dice.expovariate(1 / 50), dice.uniform(15, 60)
        thinker.passages.append((min(passage, limit), passage <= limit))
    found = thinker.findings()
    assert abs(found["rate_per_ns"] - 20) < 3 * found["rate_error_per_ns"]
    assert found["rate_error_per_ns"] == pytest.approx(found["rate_per_ns"] / math.sqrt(found["crossings"]), rel=0.01)
