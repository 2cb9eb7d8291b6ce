"""Fluentd's forward protocol, version 1: the server's side.

https://github.com/fluent/fluentd/wiki/Forward-Protocol-Specification-v1 in the modes Message, Forward and
PackedForward, compressed or not, with acknowledgements where a client asks for them.
"""

from __future__ import annotations

import gzip
import socketserver
from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Record = dict[str, Any]

MESSAGE_FIELDS = 3
"""Tag, time and record; an option may follow."""


class ForwardServer(socketserver.ThreadingTCPServer):
    """Takes records on a TCP port, and hands each with its tag to a function."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], take: Callable[[str, Record], None]) -> None:
        self.take = take
        super().__init__(address, _Connection)


class _Connection(socketserver.BaseRequestHandler):
    server: ForwardServer

    def handle(self) -> None:
        unpacker = msgpack.Unpacker(raw=False, unicode_errors="replace", strict_map_key=False)
        while received := self._receive():
            unpacker.feed(received)
            for message in unpacker:
                for tag, record in records(message):
                    self.server.take(tag, record)
                if chunk := option(message).get("chunk"):
                    self.request.sendall(msgpack.packb({"ack": chunk}))

    def _receive(self) -> bytes:
        try:
            received: bytes = self.request.recv(1 << 16)
        except ConnectionError:
            return b""
        return received


def records(message: list[Any]) -> Iterator[tuple[str, Record]]:
    """Yield the tag and record of each event in a message, in whichever mode it is."""
    tag, entries = message[0], message[1]
    if isinstance(entries, list):
        yield from ((tag, record) for _, record in entries)
    elif isinstance(entries, bytes | str):
        packed = (
            entries if isinstance(entries, bytes) else entries.encode("utf-8", "surrogateescape")
        )
        if option(message).get("compressed") == "gzip":
            packed = gzip.decompress(packed)
        unpacker = msgpack.Unpacker(raw=False, unicode_errors="replace", strict_map_key=False)
        unpacker.feed(packed)
        yield from ((tag, record) for _, record in unpacker)
    else:
        yield tag, message[2]


def option(message: list[Any]) -> dict[str, Any]:
    """Return the option of a message, empty when there is none."""
    packed_or_forward = isinstance(message[1], list | bytes | str)
    place = MESSAGE_FIELDS - 1 if packed_or_forward else MESSAGE_FIELDS
    found = message[place] if len(message) > place else None
    return found if isinstance(found, dict) else {}
