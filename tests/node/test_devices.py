"""What a node offers: GPUs by UUID within the mask, or its cores."""

import logging
import math
import os
import platform
import sys
from pathlib import Path

import pytest

from mdcampaign.errors import ProtocolError
from mdcampaign.node import devices, protocol
from mdcampaign.node.options import Options
from mdcampaign.node.slots import SlotTable, equip
from tests.node import tasks
from tests.node.fake_broker import FakeBroker

FAKE_NVML = str(Path(__file__).parent / "fake_nvml")
UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let `import pynvml` find the stand-in, with three cards."""
    monkeypatch.syspath_prepend(FAKE_NVML)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("FAKE_GPUS", ",".join(UUIDS))
    return monkeypatch


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (None, UUIDS),
        ("2,0", ["GPU-bb33", "GPU-aa11"]),
        ("GPU-bb33", ["GPU-bb33"]),
        ("GPU-b, 1", ["GPU-bb33", "GPU-aa22"]),
        ("1,1", ["GPU-aa22"]),
        ("0,GPU-aa,2", ["GPU-aa11"]),  # ambiguous: the list ends, as in CUDA
        ("0,9,2", ["GPU-aa11"]),
        ("-1", []),
        ("NoDevFiles", []),
        ("MIG-1234,2", ["MIG-1234", "GPU-bb33"]),  # G7
        ("MIG-GPU-aa11/1/0", ["MIG-GPU-aa11/1/0"]),
    ],
)
def test_mask(mask: str | None, found: list[str]) -> None:
    """G1, G5, G7: numbers, UUIDs and MIG instances; nothing outside the mask."""
    assert devices.visible(mask, UUIDS) == found


def test_gpus_of_the_node(nvml: pytest.MonkeyPatch) -> None:
    found = devices.discover({"CUDA_VISIBLE_DEVICES": "2,MIG-7,0"})
    assert [device.uuid for device in found] == ["GPU-bb33", "MIG-7", "GPU-aa11"]
    assert [device.kind for device in found] == ["gpu", "mig", "gpu"]
    assert found[0].memory_mb == 80 * 1024 and found[0].model == "Fake H100"
    assert [device.kind for device in devices.discover({"CUDA_VISIBLE_DEVICES": ""})] == ["cpu"]


def test_one_lost_card_hides_no_other(nvml: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """N4."""
    nvml.setenv("FAKE_GPUS", "GPU-aa11:lost,GPU-aa22")
    assert [device.uuid for device in devices.discover({})] == ["GPU-aa22"]
    assert "GPU number 0 is left out: NVML says GPU is lost" in caplog.text


def test_nvml_that_hangs_is_given_up(nvml: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    nvml.setenv("FAKE_GPUS", "hangs")
    nvml.setattr(devices, "NVML_LIMIT_S", 0.2)
    assert [device.kind for device in devices.discover({})] == ["cpu"]
    assert "NVML did not answer" in caplog.text


def test_without_a_driver_the_cores_are_the_device(nvml: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    nvml.delenv("FAKE_GPUS")
    with caplog.at_level(logging.WARNING):
        [device] = devices.discover({"CUDA_VISIBLE_DEVICES": "0", "PARSL_MEMORY_GB": "3"})
    assert (device.uuid, device.kind, device.memory_mb) == (f"cpu:{platform.node()}", "cpu", 3072)
    assert caplog.messages == ["no GPU: NVML says Driver Not Loaded, although CUDA_VISIBLE_DEVICES is 0"]


def options(**fields: object) -> Options:
    return Options(addresses="", port=0, uid="u", block_id="7", **fields)  # type: ignore[arg-type]


def gpus(count: int) -> list[protocol.DeviceReport]:
    return [protocol.DeviceReport(uuid=f"GPU-{n}", kind="gpu", slot_cores=[]) for n in range(count)]


def counts(found: list[protocol.DeviceReport], environ: dict[str, str] | None = None, **fields: object) -> list[int]:
    return [len(device.slot_cores) for device in equip(found, options(**fields), environ or {})]


def test_slots_of_gpus() -> None:
    assert counts(gpus(2)) == [1, 1]
    assert counts(gpus(2), slots_per_device=3) == [3, 3]
    assert counts(gpus(2), max_workers_per_node=4) == [2, 2]
    assert counts(gpus(3), max_workers_per_node=2) == [1, 1]


def test_slots_of_cores_are_as_many_as_htex_would_start_workers() -> None:
    here = [devices.cpu_device({"PARSL_MEMORY_GB": "8"})]
    assert counts(here) == [len(os.sched_getaffinity(0))]
    assert counts(here, {"PARSL_CORES": "8"}, cores_per_worker=2) == [4]
    assert counts(here, {"PARSL_CORES": "8"}, cores_per_worker=2, max_workers_per_node=3) == [3]
    assert counts(here, {"PARSL_CORES": "8", "PARSL_MEMORY_GB": "8"}, mem_per_worker=4.0) == [2]
    assert counts(here, {"PARSL_CORES": "1"}, cores_per_worker=64) == [1]
    assert counts(here, {"PARSL_CORES": "1"}, cores_per_worker=0.5) == [2]
    assert counts(here, slots_per_device=5, max_workers_per_node=2) == [5]


def place(**fields: object) -> protocol.Place:
    return protocol.Place(**({"task": 1, "attempt": 1, "name": "j", "device": "GPU-1", "index": [0]} | fields))  # type: ignore[arg-type]


def test_slot_and_environment_of_a_gpu() -> None:
    """G1, G4, C3: the mask is the UUID, never a number, never empty; ranks count over all devices."""
    found = [
        protocol.DeviceReport(uuid=f"GPU-{n}", kind="gpu", slot_cores=[[4 * n, 4 * n + 1], [4 * n + 2, 4 * n + 3]])
        for n in (0, 1)
    ]
    table = SlotTable(found, options())
    slot = table.slot(place(index=[1]))
    assert (slot.gpus, slot.cores, slot.threads, slot.kind) == (("GPU-1",), (6, 7), 2, "gpu")
    environ = table.environment(slot, {"OMP_NUM_THREADS": "9"})
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert "OMP_NUM_THREADS" not in environ and environ["OPENMM_CPU_THREADS"] == "2"
    assert (environ["PARSL_WORKER_RANK"], environ["PARSL_WORKER_COUNT"]) == ("3", "4")
    both = table.slot(place(index=[1, 0], exclusive=True))
    assert (both.index, both.cores, both.threads, both.exclusive) == ((0, 1), (4, 5, 6, 7), 4, True)
    for wrong in ([], [2], [-1], [0, 2]):
        with pytest.raises(ProtocolError, match="has 2 slots"):
            table.slot(place(index=wrong))


def test_threads_where_cores_are_shared() -> None:
    """C4: one for each slot held."""
    table = SlotTable([protocol.DeviceReport(uuid="GPU-1", kind="gpu", slot_cores=[[0, 1]] * 3)], options())
    assert table.slot(place()).threads == 1
    assert table.slot(place(index=[0, 1, 2])).threads == 2  # no more than there are cores


def test_an_agent_with_gpus(broker: FakeBroker) -> None:
    """G1, G5: of three cards the agent offers the two in its mask, and a job sees just the one of its slot."""
    path = os.pathsep.join([FAKE_NVML, *filter(None, sys.path)])
    broker.start(slots=1, PYTHONPATH=path, FAKE_GPUS=",".join(UUIDS), CUDA_VISIBLE_DEVICES="2,0")
    found = broker.wait(protocol.Register).devices
    assert [device.uuid for device in found] == ["GPU-bb33", "GPU-aa11"]
    jobs = [broker.place(tasks.surroundings, device=device.uuid) for device in found]
    seen = [broker.result(job) for job in jobs]
    assert [job["environ"]["CUDA_VISIBLE_DEVICES"] for job in seen] == ["GPU-bb33", "GPU-aa11"]
    assert [job["slot"].gpus for job in seen] == [("GPU-bb33",), ("GPU-aa11",)]
    assert [job["environ"]["PARSL_WORKER_RANK"] for job in seen] == ["0", "1"]
    assert math.prod(len(device.slot_cores) for device in found) == 1
