"""A proxy on loopback in front of a store, which on command treats its clients badly. Seeded.

`BadProxy` speaks HTTP/1.1 and knows where a reply's body begins, so it can lie about objects; with `raw` it passes
bytes on as they come, for Redis. Each reply meets the fault that is set when its request has been read. Connections
that a fault holds are closed when another one is set.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple, get_args

HOST = "127.0.0.1"

Kind = Literal[
    "pass",
    "delay",
    "stall",
    "cut",
    "starve",
    "short",
    "status",
    "flip",
    "swap",
    "refuse",
    "black hole",
    "hold uploads",
]
KINDS: tuple[str, ...] = get_args(Kind)
_CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}
_BODIES_MAX = 64


class Fault(NamedTuple):
    """What befalls replies.

    `delay`: each comes `delay_s` late. `stall`: the request is read, and nothing comes. `cut`: half of the body, then
    the end. `starve`: half of the body, then silence. `short`: half of the body, and the head agrees. `status`: an
    error of this status. `flip`: one bit in each 2 KiB of the body is another. `swap`: the body of another GET, of
    the same length if there was one. `refuse`: nobody listens. `black hole`: connections are taken, and no request is
    read. `hold uploads`: half of a PUT's body goes to the store, and then nothing more does.
    """

    kind: Kind = "pass"
    delay_s: float = 0.0
    status: int = 500
    share: float = 1.0
    """The part of the replies that it befalls."""
    path: bytes = b""
    """Only those to requests with this in their path. Without meaning to `raw`."""
    times: int = 0
    """So many of them, and then none any more; 0 is without end."""


GOOD = Fault()


class _Head(NamedTuple):
    """The first line of a message, and its header fields as they came."""

    first: bytes
    fields: list[tuple[bytes, bytes]]

    def get(self, name: bytes) -> bytes:
        return next((value for key, value in self.fields if key.lower() == name), b"")

    def encode(self, length: int | None) -> bytes:
        """The head as bytes, with another length of the body, or as it is."""
        fields = self.fields
        if length is not None:
            own = (b"content-length", b"transfer-encoding")
            fields = [field for field in fields if field[0].lower() not in own]
            fields = [*fields, (b"Content-Length", b"%d" % length)]
        return b"\r\n".join([self.first, *(b": ".join(field) for field in fields), b"", b""])


class BadProxy:
    """Listens on `port` in front of the server at `target_port`. Threads of its own; end it with `close`."""

    def __init__(self, target_port: int, seed: int = 0, raw: bool = False) -> None:
        self._target_port = target_port
        self._raw = raw
        self._chance = random.Random(seed)
        self._changed = threading.Condition()
        self._turn = 0
        self._fault = GOOD
        self._closed = False
        self._open: set[socket.socket] = set()
        self._bodies: deque[tuple[bytes, bytes]] = deque(maxlen=_BODIES_MAX)
        self._times = 0
        self.befell: Counter[str] = Counter()
        """How many replies met each kind of fault."""
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]

    def set(self, fault: Fault) -> None:
        """From now on this befalls replies. What was held is closed."""
        with self._changed:
            before, self._fault, self._times = self._fault, fault, 0
            self._turn += 1
            self._changed.notify_all()
            refuses = fault.kind == "refuse"
            if refuses:
                self._hang_up()
        if refuses and before.kind != "refuse":
            self._stop_listening()
        elif not refuses and before.kind == "refuse":
            self._listener = self._listen(self.port)

    def heal(self) -> None:
        """Everything passes again."""
        self.set(GOOD)

    def wait_for(self, kind: Kind, count: int = 1, timeout_s: float = 20.0) -> None:
        """Wait until so many replies have met this fault, since the beginning."""
        with self._changed:
            in_time = self._changed.wait_for(lambda: self.befell[kind] >= count, timeout_s)
        assert in_time, f"{kind} befell {self.befell[kind]} of {count} replies in {timeout_s:g} s"

    def close(self) -> None:
        """End every connection."""
        with self._changed:
            self._closed = True
            self._turn += 1
            self._changed.notify_all()
            self._hang_up()
        if self._fault.kind != "refuse":
            self._stop_listening()

    def __enter__(self) -> BadProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- connections

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server((HOST, port), backlog=128)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as ends, contextlib.suppress(OSError, ValueError):
            ends.enter_context(self._kept(client))
            if self._raw:
                self._serve_raw(client)
            else:
                self._serve_http(client)

    @contextlib.contextmanager
    def _kept(self, connection: socket.socket) -> Iterator[None]:
        with self._changed:
            refused = self._closed or self._fault.kind == "refuse"
            if not refused:
                self._open.add(connection)
        try:
            if not refused:
                yield
            else:
                raise OSError("nobody is here")
        finally:
            with self._changed:
                self._open.discard(connection)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # another thread may still read from it
            connection.close()

    def _hang_up(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                # The other end gets a reset, not an end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _upstream(self) -> socket.socket:
        upstream = socket.create_connection((HOST, self._target_port), timeout=30.0)
        upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return upstream

    # ---- faults

    def _met(self, path: bytes = b"") -> tuple[Fault, int]:
        """What befalls the next reply, and the turn in which it does."""
        with self._changed:
            fault = self._fault
            spared = fault.path not in path or 0 < fault.times <= self._times
            if spared or (fault.share < 1.0 and self._chance.random() >= fault.share):
                fault = GOOD
            else:
                self._times += 1
            self.befell[fault.kind] += 1
            self._changed.notify_all()
            return fault, self._turn

    def _hold(self, turn: int, seconds: float | None = None) -> None:
        """Until another fault is set, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn != turn, seconds)

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        with self._changed:
            for start in range(0, len(changed), 2048):
                place = self._chance.randrange(start, min(len(changed), start + 2048))
                changed[place] ^= 1 << self._chance.randrange(8)
        return bytes(changed)

    def _other_body(self, path: bytes, body: bytes) -> bytes:
        """The body of a GET before this one, and remember this one's."""
        with self._changed:
            others = [other for where, other in self._bodies if other != body]
            self._bodies.append((path, body))
            alike = [other for other in others if len(other) == len(body)]
            return self._chance.choice(alike or others or [body])

    # ---- bytes as they come

    def _serve_raw(self, client: socket.socket) -> None:
        upstream = self._upstream()
        with self._kept(upstream):
            up = threading.Thread(target=self._pump_up, args=(client, upstream), daemon=True)
            up.start()
            while data := upstream.recv(1 << 16):
                fault, turn = self._met()
                if fault.kind in ("stall", "black hole"):
                    self._hold(turn)
                    return
                if fault.kind == "delay":
                    self._hold(turn, fault.delay_s)
                if fault.kind in ("cut", "starve", "short"):
                    client.sendall(data[: len(data) // 2])
                    if fault.kind == "starve":
                        self._hold(turn)
                    return
                client.sendall(self._flipped(data) if fault.kind == "flip" else data)

    def _pump_up(self, client: socket.socket, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                upstream.sendall(data)
        with contextlib.suppress(OSError):
            upstream.shutdown(socket.SHUT_RDWR)

    # ---- HTTP

    def _serve_http(self, client: socket.socket) -> None:
        requests = client.makefile("rb")
        upstream = self._upstream()
        with self._kept(upstream):
            replies = upstream.makefile("rb")
            while (head := _read_head(requests)) is not None:
                method, path, _ = head.first.split(b" ", 2)
                fault, turn = self._met(path)
                if fault.kind == "black hole":
                    self._hold(turn)
                    return
                body = _read_body(requests, head)
                if fault.kind == "stall":
                    self._hold(turn)
                    return
                if fault.kind == "status":
                    client.sendall(_error(fault.status, method == b"HEAD"))
                    continue
                if fault.kind == "hold uploads" and method == b"PUT" and len(body) > 1:
                    upstream.sendall(head.encode(None) + body[: len(body) // 2])
                    self._hold(turn)
                    return
                upstream.sendall(head.encode(len(body) if body else None) + body)
                if not self._reply(client, replies, method, path, fault, turn):
                    return

    def _reply(
        self, client: socket.socket, replies: BinaryIO, method: bytes, path: bytes, fault: Fault, turn: int
    ) -> bool:
        """Pass one reply on, as well as the fault lets it. Whether the connection goes on."""
        head = _read_head(replies)
        if head is None:
            return False
        status = int(head.first.split(b" ", 2)[1])
        if method == b"HEAD" or status in (204, 304):
            client.sendall(head.encode(None))
            return True
        body = _read_body(replies, head)
        if fault.kind == "delay":
            self._hold(turn, fault.delay_s)
        an_object = method == b"GET" and b"list-type" not in path and status in (200, 206)
        if an_object:
            other = self._other_body(path, body)
            body = other if fault.kind == "swap" else body
        half = body[: len(body) // 2]
        if fault.kind in ("cut", "starve"):
            client.sendall(head.encode(len(body)) + half)
            if fault.kind == "starve":
                self._hold(turn)
            return False
        if fault.kind == "flip":
            body = self._flipped(body)
        if fault.kind == "short":
            body = half
        client.sendall(head.encode(len(body)) + body)
        return True


def _read_head(reader: BinaryIO) -> _Head | None:
    """The next message's head; None at the end of the connection."""
    first = reader.readline(65536).rstrip(b"\r\n")
    if not first:
        return None
    fields: list[tuple[bytes, bytes]] = []
    while line := reader.readline(65536).rstrip(b"\r\n"):
        name, _, value = line.partition(b":")
        fields.append((name, value.strip()))
    return _Head(first, fields)


def _read_body(reader: BinaryIO, head: _Head) -> bytes:
    if head.get(b"transfer-encoding").lower() == b"chunked":
        parts: list[bytes] = []
        while size := int(reader.readline(100).split(b";")[0], 16):
            parts.append(reader.read(size))
            reader.readline(10)
        while reader.readline(65536).rstrip(b"\r\n"):
            pass
        return b"".join(parts)
    return reader.read(int(head.get(b"content-length") or 0))


def _error(status: int, bodiless: bool) -> bytes:
    code = _CODES.get(status, "InternalError")
    body = b"" if bodiless else b"<Error><Code>%s</Code></Error>" % code.encode()
    return b"HTTP/1.1 %d %s\r\nContent-Length: %d\r\n\r\n%s" % (status, code.encode(), len(body), body)
