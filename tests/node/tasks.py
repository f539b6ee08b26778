"""What tests run in slots. Module-level, so that a task buffer names them and the runner imports them."""

import ctypes
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from mdcampaign.jobs import Outcome
from mdcampaign.slot import current


def nothing():
    pass


def pid():
    return os.getpid()


def echo(value):
    return value


def fail(text):
    raise ValueError(text)


def unpicklable_result():
    return (line for line in "ab")


class Stubborn(Exception):
    """An exception that no serialiser takes."""

    def __reduce__(self):
        raise TypeError("not me")


def unpicklable_exception():
    raise Stubborn("a stubborn one")


def surroundings():
    """What a job sees of its slot."""
    return {
        "environ": dict(os.environ),
        "cores": sorted(os.sched_getaffinity(0)),
        "slot": current().slot,
        "name": current().name,
        "attempt": current().attempt,
        "cwd": str(Path.cwd()),
        "sid": os.getsid(0),
        "pid": os.getpid(),
        "random": random.random(),
        "modules": [name for name in ("numpy", "openmm") if name in sys.modules],
        "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    }


def disturb():
    """Change what the next task in this process must not see."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "7"
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    return os.getpid()


def talk(text, error):
    print(text)
    print(error, file=sys.stderr)


def chatter(count):
    for _ in range(count):
        sys.stdout.write("x" * 1023 + "\n")


def wait_for(path):
    """Wait until a file is there: how a test holds a task."""
    while not Path(path).exists():
        time.sleep(0.005)
    return os.getpid()


def family(path):
    """A shell that runs sleep, and a daemon in a session of its own; their pids go to `path`, then wait for ever."""
    shell = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    sleeping = int(shell.stdout.readline())
    daemon = _daemon()
    _tell(path, [os.getpid(), shell.pid, sleeping, daemon])
    time.sleep(1000)


def leave_daemon(path):
    """Return while a daemon lives on."""
    _tell(path, [_daemon()])
    return os.getpid()


def _daemon():
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=2).pid)"
    answer = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return int(answer.stdout)


def _tell(path, pids):
    Path(f"{path}.part").write_text(" ".join(map(str, pids)))
    Path(f"{path}.part").rename(path)


def report(steps):
    """Report each step and return the directives that came back."""
    return [current().report(step=step, target_step=steps, energy=1.0 * step).kind for step in range(1, steps + 1)]


def flood(steps):
    """Report much faster than anybody reads."""
    for step in range(1, steps + 1):
        current().report(step=step, target_step=steps)


def iterate():
    """Report until told otherwise; yield when asked to."""
    step = 0
    while True:
        step += 1
        directive = current().report(step=step, target_step=1_000_000)
        if directive.kind == "yield":
            return current().interrupted(step=step)
        if directive.kind != "continue":
            return directive
        time.sleep(0.005)


def deaf(path):
    """Report once, say so, and never look at a directive."""
    current().report(step=1, target_step=2)
    _tell(path, [os.getpid()])
    time.sleep(1000)


def device_failure():
    current().end(Outcome("failed", failure="device", message="illegal address"))
    raise RuntimeError("illegal address")


def exit_by(code):
    os._exit(code)


def system_exit(code):
    sys.exit(code)


def segfault():
    ctypes.string_at(0)


def monitored(count):
    """Send monitoring messages as Parsl does, from this process and a forked one at once."""
    from parsl.monitoring.radios.htex import HTEXRadioSender

    def send(who):
        radio = HTEXRadioSender()
        for number in range(count):
            radio.send((who, number, "m" * (100_000 if number == 0 else 100)))

    helper = multiprocessing.get_context("fork").Process(target=send, args=("helper",))
    helper.start()
    send("task")
    helper.join()
    return helper.exitcode


def executor(buffer, *args, **kwargs):
    """Stands where a task's context may name another executor of buffers."""
    return [len(buffer), list(args), kwargs]


def stamp(seconds):
    """Take this long; return when it started and ended, by the clock that all processes share."""
    start = time.monotonic()
    time.sleep(seconds)
    return start, time.monotonic()


def wait_elsewhere(path):
    """Wait in another directory; that the runner is back in its own shows that it has sent the result."""
    os.chdir("/")
    return wait_for(path)
