"""WebSocket streams from one process, cheap enough not to be what is measured.

Used by streams_serve.py.  Sockets are read and written as they are: every frame of a step has the
same bytes but its number, so none is built or parsed by a library.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import time

import numpy as np

N_IN, N_OUT = 64, 16
OPENING = 50  # connections under way at once
BINARY, CLOSE, PING, PONG = 0x82, 0x88, 0x89, 0x8A
MASK = bytes(4)  # a mask of zeros changes nothing, and a client must mask


def frame(kind, payload):
    """A client's frame."""
    n = len(payload)
    length = bytes([0x80 | n]) if n < 126 else b"\xfe" + struct.pack(">H", n)
    return bytes([kind]) + length + MASK + payload


class Connection:
    """One stream: what came in and is no whole frame yet, what could not be sent yet."""

    def __init__(self, address, seed):
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host = f"{address[0]}:{address[1]}"
        self.socket.sendall(
            f"GET /v1/ws HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        self.x = np.random.default_rng(seed).standard_normal(N_IN).astype("<f4").tobytes()
        self.number = 0
        self.due = []  # of steps that are not answered, in order
        self.inward = b""
        self.outward = b""

    def greet(self):
        """Says which stream, once the server has shaken hands."""
        self._receive(b"\r\n\r\n")
        self.socket.sendall(frame(0x81, b'{"open": null}'))

    def greeted(self):
        """Waits for the answer to that."""
        self._receive(b"}")
        self.socket.setblocking(False)

    def _receive(self, end):
        data = b""
        while not data.endswith(end):
            part = self.socket.recv(4096)
            if not part:
                raise ConnectionError(f"the server refused a stream: {data!r}")
            data += part

    def send(self, due):
        """Asks for the next step, which was due at that time."""
        self.number += 1
        self.due.append(due)
        self.write(frame(BINARY, struct.pack("<Q", self.number) + self.x))

    def write(self, data):
        self.outward += data
        with contextlib.suppress(BlockingIOError):
            self.outward = self.outward[self.socket.send(self.outward) :]

    def answers(self):
        """How many answers have come since."""
        with contextlib.suppress(BlockingIOError):
            part = self.socket.recv(1 << 16)
            if not part:
                raise ConnectionError("the server closed a stream")
            self.inward += part
        if self.outward:
            self.write(b"")
        found = 0
        while len(self.inward) >= 2:
            kind, n, at = self.inward[0], self.inward[1], 2
            if n == 126:
                n, at = int.from_bytes(self.inward[2:4], "big"), 4
            if len(self.inward) < at + n:
                break
            payload, self.inward = self.inward[at : at + n], self.inward[at + n :]
            if kind == BINARY:
                found += 1
            elif kind == PING:
                self.write(frame(PONG, payload))
            elif kind == CLOSE:
                raise ConnectionError(f"the server closed a stream: {payload!r}")
        return found


def opened(address, streams):
    connections = []
    for first in range(0, streams, OPENING):
        some = [Connection(address, i) for i in range(first, min(first + OPENING, streams))]
        for connection in some:
            connection.greet()
        for connection in some:
            connection.greeted()
        connections += some
    return connections


def load(connections, rate, seconds):
    """Latencies in seconds, and answers a second.

    rate  steps a second of every stream, due evenly spread whether or not the last was answered.
          0: each stream sends its next step as soon as the last is answered
    """
    selector = selectors.DefaultSelector()
    for connection in connections:
        selector.register(connection.socket, selectors.EVENT_READ, connection)
    latencies, sent, n = [], 0, len(connections)
    begun = time.perf_counter()
    total = int(rate * seconds * n)
    if not rate:
        for connection in connections:
            connection.send(time.perf_counter())
    open_steps = n if not rate else 0
    while True:
        now = time.perf_counter()
        while rate and sent < total and (due := begun + sent / (rate * n)) <= now:
            connections[sent % n].send(due)
            sent += 1
            open_steps += 1
        if not open_steps and (sent == total if rate else now - begun >= seconds):
            break
        wait = 1.0
        if rate and sent < total:
            wait = max(begun + sent / (rate * n) - now, 0)
        for key, _ in selector.select(wait):
            connection = key.data
            for _ in range(connection.answers()):
                now = time.perf_counter()
                latencies.append(now - connection.due.pop(0))
                open_steps -= 1
                if not rate and now - begun < seconds:
                    connection.send(now)
                    open_steps += 1
        if now - begun > 3 * seconds + 30:
            raise TimeoutError(f"{open_steps} steps were never answered")
    return np.array(latencies), len(latencies) / (time.perf_counter() - begun)


def main():
    """Arguments: host, port, streams.  Reads {"rate", "seconds"} from each line of its input."""
    host, port, streams = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    connections = opened((host, port), streams)
    print("open", flush=True)
    for line in sys.stdin:
        latencies, throughput = load(connections, **json.loads(line))
        p50, p99, p999 = np.quantile(latencies, [0.5, 0.99, 0.999]) * 1e3
        times = os.times()
        print(json.dumps({
            "answers_a_second": round(throughput, 1),
            "p50_ms": round(p50, 3),
            "p99_ms": round(p99, 3),
            "p999_ms": round(p999, 3),
            "mean_ms": round(float(latencies.mean()) * 1e3, 3),
            "answers": len(latencies),
            "client_cpu_s": round(times.user + times.system, 2),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
