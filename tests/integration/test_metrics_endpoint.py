"""The metrics endpoint: on loopback only, and no request keeps it from answering the next."""

import socket
from urllib.request import urlopen

from testbed.ports import LOOPBACK
from tests.integration.conftest import Start

HOSTILE = {
    "no line end": b"G" * 200_000,
    "endless header": b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    "many headers": b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
    "binary": bytes(range(256)) * 100 + b"\r\n\r\n",
    "path": b"GET /../../../../etc/passwd HTTP/1.1\r\n\r\n",
    "query": b"GET /metrics?name[]=%00%0d%0a%1b[2J&name[]=" + b"a" * 10_000 + b" HTTP/1.1\r\n\r\n",
    "length": b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx",
    "escape": b"GET /\x1b[2J\r\n\r\n",
}


def ask(port: int, request: bytes) -> bytes:
    """What a request is answered; nothing where it is cut off."""
    with socket.create_connection((LOOPBACK, port), timeout=60) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65_536), b""))
        except (ConnectionError, BrokenPipeError):
            return b""


def test_no_request_does_harm(start: Start) -> None:
    """Garbage, requests without end and such as are still on their way leave the endpoint as it was, and nothing in the log."""
    tracker = start("tracker")
    waiting = [socket.create_connection((LOOPBACK, tracker.metrics_port)) for _ in range(20)]
    for request in HOSTILE.values():
        assert b"root:" not in ask(tracker.metrics_port, request)
    with urlopen(f"http://{LOOPBACK}:{tracker.metrics_port}/metrics") as answer:
        assert b"fairpost_events_total" in answer.read()
    for connection in waiting:
        connection.close()
    assert tracker.process.running
    log = tracker.log.read_text()
    assert not any(word in log for word in ("Traceback", "Exception", "passwd", "GET"))
    for address in socket.gethostbyname_ex(socket.gethostname())[2]:
        if not address.startswith("127."):
            with socket.socket() as probe:
                assert probe.connect_ex((address, tracker.metrics_port)) != 0
