"""Cores are divided so that no two slots meet."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdcampaign.errors import BadInput
from mdcampaign.node import cores


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 64), st.sampled_from(cores.ORDERS))
def test_blocks_are_disjoint_and_equal_and_as_large_as_can_be(usable: set[int], slots: int, affinity: str) -> None:
    """C1, C2, C4, C7."""
    blocks = cores.divide(sorted(usable), slots, affinity)
    assert len(blocks) == slots
    assert usable.issuperset(core for block in blocks for core in block)
    if slots > len(usable):
        assert all(set(block) == usable for block in blocks)
        assert cores.are_shared(blocks)
    else:
        assert {len(block) for block in blocks} == {len(usable) // slots}
        assert not cores.are_shared(blocks)


def test_orders_are_those_of_htex() -> None:
    usable = [0, 1, 2, 3, 8]
    assert cores.divide(usable, 2, "block") == [[0, 1], [2, 3]]
    assert cores.divide(usable, 2, "none") == [[0, 1], [2, 3]]
    assert cores.divide(usable, 2, "block-reverse") == [[2, 3], [0, 1]]
    assert cores.divide(usable, 2, "alternating") == [[0, 2], [1, 3]]
    assert cores.divide(usable, 2, "list:0,8:1-3") == [[0, 8], [1, 2, 3]]


def test_a_large_node() -> None:
    """C7: 208 threads over 12 slots."""
    blocks = cores.divide(range(208), 12)
    assert {len(block) for block in blocks} == {17}


@pytest.mark.parametrize(
    ("affinity", "problem"),
    [
        ("blok", "unknown value .*Did you mean 'block'"),
        ("list:0", "1 lists for 2 slots"),
        ("list:0:x", "not a list of cores"),
        ("list:0:9", r"cores \[9\] are not ours"),
        ("list:0-1:1-2", "a core is listed twice"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(affinity: str, problem: str) -> None:
    """C7: overlap in the list is an error."""
    with pytest.raises(BadInput, match=f"cpu_affinity: {problem}"):
        cores.divide([0, 1, 2, 3], 2, affinity)


def test_allowed_cores_are_those_of_this_process() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert cores.allowed({}) == mine
    assert cores.allowed({"PARSL_CORES": "1"}) == mine[:1]
    assert cores.allowed({"PARSL_CORES": "1000"}) == mine
