"""Stands in for nvidia-ml-py: the cards are those of FAKE_GPUS, "UUID[:lost],..."; without it there is no driver."""

import os
import time


class NVMLError(Exception):
    pass


def _gpus():
    return [entry.split(":") for entry in os.environ["FAKE_GPUS"].split(",")]


def nvmlInit():
    if "FAKE_GPUS" not in os.environ:
        raise NVMLError("Driver Not Loaded")
    if os.environ["FAKE_GPUS"] == "hangs":
        time.sleep(1000)


def nvmlDeviceGetCount():
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index):
    if _gpus()[index][-1] == "lost":
        raise NVMLError("GPU is lost")
    return _gpus()[index][0]


def nvmlDeviceGetHandleByUUID(uuid):
    return uuid


def nvmlDeviceGetUUID(handle):
    return handle


def nvmlDeviceGetName(handle):
    return "Fake H100"


def nvmlDeviceGetMemoryInfo(handle):
    class Info:
        total = 80 << 30

    return Info
