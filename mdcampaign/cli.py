"""The command line. One function a command; what a command needs is imported when it is called."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mdcampaign.errors import BadInput, MDCampaignError

EXIT_BAD_INPUT = 2
EXIT_TROUBLE = 1


def run(arguments: argparse.Namespace) -> int:
    """Run a campaign file, or go on with it."""
    from mdcampaign.display import Display
    from mdcampaign.launch import run_file
    from mdcampaign.report import show

    console = Console(stderr=arguments.json)
    summary, status = run_file(arguments.file, take_over=arguments.take_over, display=Display())
    show(summary, console)
    if arguments.json:
        print(json.dumps(summary.as_dict()))
    return status


def status(arguments: argparse.Namespace) -> int:
    """Show where a campaign stands."""
    from mdcampaign import inquiry

    told = inquiry.status(arguments.directory)
    if arguments.json:
        print(json.dumps(told.as_dict()))
    else:
        inquiry.show_status(told, Console())
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """Say why a job is not running, or how it ended."""
    from mdcampaign import inquiry

    print(inquiry.explain(arguments.directory, arguments.job))
    return 0


def stop(arguments: argparse.Namespace) -> int:
    """Stop a job early and keep its result, or end the whole campaign."""
    from mdcampaign import inquiry

    answer = inquiry.ask(arguments.directory, "stop", arguments.job)
    print(answer.message or ("done" if answer.ok else "refused"))
    return 0 if answer.ok else EXIT_TROUBLE


def report(arguments: argparse.Namespace) -> int:
    """Print the summary of a campaign."""
    from mdcampaign.report import show, summarise

    summary = summarise(arguments.directory)
    if arguments.json:
        print(json.dumps(summary.as_dict()))
    else:
        show(summary, Console())
    return 0


def init(arguments: argparse.Namespace) -> int:
    """Write a campaign file for a folder of tpr files."""
    from mdcampaign.scaffold import init as scaffold

    written = scaffold(arguments.directory)
    print("\n".join(f"wrote {path}" for path in written))
    print(f"Look at them, then: mdcampaign run {written[0]}")
    return 0


def simulate(arguments: argparse.Namespace) -> int:
    """Compare continuous batching with FIFO refill and static batches on simulated jobs: no MD, no GPU, seconds."""
    from mdcampaign import comparison

    figures = comparison.simulate(
        named=arguments.workload,
        jobs=arguments.jobs,
        durations=arguments.durations,
        seed=arguments.seed,
        csv=arguments.csv,
        devices=arguments.devices,
        slots=arguments.slots,
        aging=arguments.aging,
        lengths=arguments.lengths,
    )
    if arguments.json:
        print(json.dumps(figures))
    else:
        comparison.show(figures, Console(highlight=False))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each command's help shows an example."""
    top = argparse.ArgumentParser(prog="mdcampaign", description="Molecular-dynamics campaigns on HPC.")
    top.add_argument("--debug", action="store_true", help="show tracebacks, and log to stderr")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def add(function, example: str) -> argparse.ArgumentParser:  # type: ignore[no-untyped-def]
        text = (function.__doc__ or "").strip()
        command = commands.add_parser(
            function.__name__,
            help=text.splitlines()[0],
            description=text,
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(function=function)
        return command

    command = add(run, "mdcampaign run configs/quickstart.yaml")
    command.add_argument("file", type=Path, help="campaign file (YAML)")
    command.add_argument("--json", action="store_true", help="make the last line of stdout one JSON object")
    command.add_argument("--take-over", action="store_true", help="take a lock whose owner's host cannot be asked")

    command = add(status, "mdcampaign status campaigns/quickstart")
    command.add_argument("directory", type=Path, help="campaign directory")
    command.add_argument("--json", action="store_true", help="print one JSON object")

    command = add(explain, "mdcampaign explain campaigns/quickstart ala/r07")
    command.add_argument("directory", type=Path, help="campaign directory")
    command.add_argument("job", help="GROUP/NAME, or NAME where it is the only one")

    command = add(stop, "mdcampaign stop campaigns/quickstart ala/r07")
    command.add_argument("directory", type=Path, help="campaign directory")
    command.add_argument(
        "job", nargs="?", help="a job; without it the campaign ends, and running jobs save their state"
    )

    command = add(report, "mdcampaign report campaigns/quickstart")
    command.add_argument("directory", type=Path, help="campaign directory")
    command.add_argument("--json", action="store_true", help="print one JSON object")

    command = add(init, "mdcampaign init my-tpr-files/")
    command.add_argument("directory", type=Path, help="folder of .tpr files")

    command = add(simulate, "mdcampaign simulate --jobs 1000 --devices 8 --slots 8 --durations lognormal:600,1")
    command.add_argument(
        "--workload", metavar="tutorial", help="8 jobs of 2 to 12 s, two urgent; used if none is given"
    )
    command.add_argument("--jobs", metavar="N", help="number of jobs (8)")
    command.add_argument(
        "--durations", metavar="SPEC", help="uniform:LOW,HIGH | lognormal:MEAN,CV | constant:X, s (uniform:2,12)"
    )
    command.add_argument("--seed", metavar="N", default="42", help="same seed, same output (42)")
    columns = "duration_s and, where wanted, name, priority, submitted_s, slots, exclusive, memory_mb, cores"
    command.add_argument("--csv", metavar="FILE", help=f"instead: one job a line, under a header with {columns}")
    command.add_argument("--devices", metavar="N", default="1", help="number of devices (1)")
    command.add_argument("--slots", metavar="N", default="2", help="slots of each device (2)")
    command.add_argument("--aging", metavar="RATE", help="levels of priority gained by a second of waiting (1 a day)")
    command.add_argument("--lengths", metavar="known|unknown", default="known", help="are lengths known before (known)")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for trouble, 2 for what was refused, 128 + n after signal n."""
    arguments = parser().parse_args(argv)
    if arguments.debug:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        return int(arguments.function(arguments))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MDCampaignError, OSError) as exc:
        if arguments.debug:
            raise
        print(f"mdcampaign: {exc}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(exc, BadInput) else EXIT_TROUBLE


if __name__ == "__main__":
    sys.exit(main())
