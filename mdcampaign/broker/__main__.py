"""The process: starts a `Broker` as HTEX starts its interchange, which is what HTEX's executor expects to find."""

from __future__ import annotations

import json
import logging
import pickle
import signal
import sys
from pathlib import Path

from parsl.log_utils import set_file_logger

from mdcampaign.broker.broker import Broker
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.scheduler import DeviceSpec

logger = logging.getLogger("mdcampaign.broker")


def main() -> None:
    """Start as HTEX starts its interchange: the configuration pickled on stdin, and ours as JSON in argv[1]."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the campaign process alone decides when to end
        signal.signal(number, signal.SIG_IGN)
    config = pickle.load(sys.stdin.buffer)
    ours = json.loads(sys.argv[1])
    Path(config["logdir"]).mkdir(parents=True, exist_ok=True)
    set_file_logger(f"{config['logdir']}/interchange.log", name="mdcampaign", level=config["logging_level"])
    declared = [DeviceSpec(**device) for device in ours["declared"]]
    broker = Broker(config, Policy(**ours["policy"]), declared, ours["events"])
    try:
        broker.run()
    except Exception:
        logger.exception("The broker ends by an error of its own")
        raise


if __name__ == "__main__":
    main()
