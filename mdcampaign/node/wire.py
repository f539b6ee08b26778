"""Datagrams between agent, template and runners: a JSON header, bytes after it, and file descriptors beside it.

The sockets are AF_UNIX SOCK_SEQPACKET pairs: a message arrives whole or not at all, so several processes may write to
one end. What is larger than a datagram should be travels in a memory file (memfd_create) whose descriptor goes along
(SCM_RIGHTS). JSON and not pickle: nothing that a job's processes write can make the agent import or run anything.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mdcampaign.errors import ProtocolError

INLINE_BYTES = 60_000
"""The largest body in a datagram; a larger one goes by memory file."""

_PREFIX = struct.Struct("!?I")  # body is in a memory file; length of the JSON header
_MAX_FDS = 4
_DONT_WAIT = int(socket.MSG_DONTWAIT)  # plain numbers: an enum's operators cost as much as a system call
_SEND, _RECEIVE = int(socket.MSG_NOSIGNAL), int(socket.MSG_CMSG_CLOEXEC)
_ANCILLARY = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)


@dataclass(frozen=True)
class Datagram:
    """One message as received; the receiver owns `fds`."""

    header: dict[str, Any]
    payload: bytes = b""
    fds: tuple[int, ...] = ()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(
    sock: socket.socket, header: dict[str, Any], payload: bytes = b"", *, fds: Sequence[int] = (), wait: bool = True
) -> bool:
    """Send one message; return False when it would have to wait and `wait` is false.

    Values that JSON does not know (numpy's numbers) become floats, or text.

    Raises:
        OSError: the other end is gone.
    """
    head = _encode(header).encode()
    flags = _SEND if wait else _SEND | _DONT_WAIT
    if len(head) + len(payload) <= INLINE_BYTES:
        return _send(sock, [_PREFIX.pack(False, len(head)), head, payload], fds, flags)
    body = os.memfd_create("mdcampaign")
    try:
        for part in (head, payload):
            _write_all(body, part)
        return _send(sock, [_PREFIX.pack(True, len(head))], [body, *fds], flags)
    finally:
        os.close(body)


def receive(sock: socket.socket, *, wait: bool = True) -> Datagram | None:
    """Return the next message; None when nothing waits and `wait` is false.

    Raises:
        EOFError: the other end is gone and everything that it sent has been read.
        ProtocolError: this datagram cannot be understood; the next one may be.
    """
    flags = _RECEIVE if wait else _RECEIVE | _DONT_WAIT
    try:
        data, ancillary, _, _ = sock.recvmsg(_PREFIX.size + INLINE_BYTES, _ANCILLARY, flags)
    except BlockingIOError:
        return None
    except ConnectionError as exc:
        raise EOFError(str(exc)) from None
    if not data:
        raise EOFError("the other end is gone")
    fds = _descriptors(ancillary)
    try:
        return _parse(data, fds)
    except (ValueError, struct.error, IndexError) as exc:
        for fd in fds:
            os.close(fd)
        raise ProtocolError(f"a datagram that cannot be understood: {exc}") from None


def _send(sock: socket.socket, parts: list[bytes], fds: Sequence[int], flags: int) -> bool:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg(parts, rights, flags)
    except BlockingIOError:
        return False
    return True


def _parse(data: bytes, fds: list[int]) -> Datagram:
    in_file, head_bytes = _PREFIX.unpack_from(data)
    if in_file:  # IndexError below: no descriptor came along, this process may open no more of them
        body = _read_all(fds[0])
        os.close(fds.pop(0))
    else:
        body = data[_PREFIX.size :]
    header = json.loads(body[:head_bytes].decode())
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    return Datagram(header, body[head_bytes:], tuple(fds))


def _descriptors(ancillary: list[Any]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    parts: list[bytes] = []
    got = 0
    while got < size and (part := os.pread(fd, size - got, got)):
        parts.append(part)
        got += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _plain(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


_encode = json.JSONEncoder(default=_plain).encode
