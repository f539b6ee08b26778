"""Trees of real processes."""

import os
import subprocess
import sys
from pathlib import Path

from mdcampaign.node import exits, options, output, processes
from tests.node.fake_broker import alive, descendants, until

BOMB = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
while True:
    if os.fork() == 0:
        time.sleep(0.2)
        os._exit(0)
    time.sleep(0.01)
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        pass
"""


def test_children_by_either_way() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 100 & sleep 100 & wait"]) as shell:
        below = until(lambda: (found := processes.children(shell.pid)) and len(found) == 2 and found, "two children")
        assert sorted(processes.children_by_status(shell.pid)) == sorted(below)
        assert shell.pid in processes.children(os.getpid())
        processes.kill_trees([shell.pid])
    until(lambda: not any(map(alive, below)), "the children to end")
    assert processes.children(shell.pid) == []


def test_a_tree_that_keeps_forking_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", BOMB]) as bomb:
        family = until(lambda: len(found := descendants(bomb.pid)) > 12 and found, "a dozen descendants")
        processes.kill_trees([bomb.pid])
    until(lambda: not any(map(alive, family)), "all of them to end")


def test_a_subreaper_knows_when_nothing_descends_from_it() -> None:
    code = """
import subprocess, sys
from mdcampaign.node import processes
processes.become_subreaper()
assert processes.childless()
start = "import subprocess, sys; print(subprocess.Popen(['sleep', '100'], start_new_session=True, stdout=2).pid)"
pid = int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, check=True).stdout)
assert not processes.childless()
assert processes.children(__import__("os").getpid()) == [pid]
processes.kill_trees([pid])
while not processes.childless():
    pass
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_output_is_cut_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "slot-0.out"
    assert not output.trim(path)
    path.write_bytes(b"first\n" + b"x" * 3000 + b"last")
    assert not output.trim(path, cap_bytes=5000)
    assert output.trim(path, cap_bytes=1000)
    assert path.read_bytes() == b"[mdcampaign: 2010 bytes of output were dropped here]\n" + b"x" * 996 + b"last"


def test_a_kill_for_want_of_memory_is_named(monkeypatch) -> None:
    counts = iter([3, 3, 4])
    monkeypatch.setattr(exits.Ooms, "_count", lambda self: next(counts))
    ooms = exits.Ooms()
    assert exits.judge(9, ooms)["message"] == "the process was killed by SIGKILL, from outside"
    assert exits.judge(9, ooms) == {
        "how": "lost",
        "signal": 9,
        "message": "the process was killed by SIGKILL, the kernel: memory ran out",
    }


def test_the_kernel_counts_what_it_kills_for_want_of_memory() -> None:
    ooms = exits.Ooms()
    assert ooms._count() >= 0 and not ooms.grew()


def test_command_line_takes_what_parsl_writes() -> None:
    required = ["-a", "a,b", "--port=1"]
    opts = options.parse([*required, "-m", "None", "--drain_period=None", "--cert_dir", "None"])
    assert (opts.mem_per_worker, opts.drain_period, opts.cert_dir, opts.address_probe_timeout) == (None, None, None, 30)
    assert opts.uid
    opts = options.parse([*required, "-m", "1.5", "--max_workers_per_node=3", "--cpu-affinity", "Block", "-d"])
    assert (opts.mem_per_worker, opts.max_workers_per_node, opts.cpu_affinity, opts.debug) == (1.5, 3, "block", True)
    assert options.parse([*required, "--max_workers_per_node", "inf"]).max_workers_per_node == float("inf")
