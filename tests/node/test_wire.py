"""Datagrams: whole or not at all, any size, with descriptors; nothing waits that should not."""

import os
import socket
import threading

import pytest

from mdcampaign.errors import ProtocolError
from mdcampaign.node import wire


@pytest.fixture
def ends():
    one, other = wire.pair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("size", [0, 1, wire.INLINE_BYTES - 100, wire.INLINE_BYTES, 5_000_000])
def test_any_size(ends: tuple[socket.socket, socket.socket], size: int) -> None:
    payload = os.urandom(size)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        assert wire.send(ends[0], {"size": size}, payload)
        message = wire.receive(ends[1])
        assert message == wire.Datagram({"size": size}, payload)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_descriptors_go_along_also_beside_a_memory_file(ends: tuple[socket.socket, socket.socket]) -> None:
    for payload in (b"", b"x" * 100_000):
        reading, writing = os.pipe()
        wire.send(ends[0], {}, payload, fds=[writing])
        os.close(writing)
        message = wire.receive(ends[1])
        assert message and message.payload == payload
        [theirs] = message.fds
        assert not os.get_inheritable(theirs)
        os.write(theirs, b"hello")
        os.close(theirs)
        assert os.read(reading, 10) == b"hello"
        os.close(reading)


def test_sending_without_waiting_says_when_the_way_is_full(ends: tuple[socket.socket, socket.socket]) -> None:
    sent = 0
    while wire.send(ends[0], {"n": sent}, b"x" * 1000, wait=False):
        sent += 1
    for number in range(sent):
        message = wire.receive(ends[1], wait=False)
        assert message and message.header == {"n": number}
    assert wire.receive(ends[1], wait=False) is None


def test_several_writers(ends: tuple[socket.socket, socket.socket]) -> None:
    def write(who: int) -> None:
        for number in range(200):
            wire.send(ends[0], {"who": who, "n": number}, bytes([who]) * 500 * number)

    writers = [threading.Thread(target=write, args=(who,)) for who in (1, 2)]
    for writer in writers:
        writer.start()
    last = {1: -1, 2: -1}
    for _ in range(400):
        message = wire.receive(ends[1])
        assert message
        who, number = message.header["who"], message.header["n"]
        assert number == last[who] + 1
        assert message.payload == bytes([who]) * 500 * number
        last[who] = number
    for writer in writers:
        writer.join()


def test_garbage_spoils_nothing_after_it(ends: tuple[socket.socket, socket.socket]) -> None:
    for garbage in (b"x", b"\x00\x00\x00\x00\x09garbage", b"\x01\x00\x00\x00\x02", b"\x00\x00\x00\x00\x02[]"):
        ends[0].send(garbage)
        with pytest.raises(ProtocolError, match="cannot be understood"):
            wire.receive(ends[1])
    wire.send(ends[0], {"ok": True})
    assert wire.receive(ends[1]) == wire.Datagram({"ok": True})


def test_what_json_does_not_know_becomes_numbers_or_text(ends: tuple[socket.socket, socket.socket]) -> None:
    class Float32:
        def __float__(self) -> float:
            return 1.5

    wire.send(ends[0], {"a": Float32(), "b": object})
    message = wire.receive(ends[1])
    assert message and message.header == {"a": 1.5, "b": "<class 'object'>"}


def test_what_was_sent_before_the_end_is_read_first() -> None:
    one, other = wire.pair()
    wire.send(one, {"last": 1}, b"y" * 100_000)
    one.close()
    with other:
        message = wire.receive(other)
        assert message and message.header == {"last": 1}
        with pytest.raises(EOFError):
            wire.receive(other)
        with pytest.raises(OSError, match="Broken pipe"):
            wire.send(other, {})
