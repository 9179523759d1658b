"""Blobs as values of one Redis or Valkey server.

Keys: `<prefix>blob/<name>` for each blob, `<prefix>names` with the names in order, `<prefix>facts` with their sizes and
times, by the server's clock. Each change of a blob and of what is known of it is one transaction or script, so they
agree. Except where the server evicts: a value that has gone is not listed, and forgotten when it is looked for; where
the names have gone, a put that finds its blob in place lists it again.

A cluster is refused: the keys of one store do not all lie on one of its nodes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import valkey
from valkey import exceptions
from valkey.backoff import NoBackoff
from valkey.retry import Retry

from kvbm.tiers.remote.blobs import BlobInfo, Buffer, Put, StoreError, StoreTrouble, valid_name
from kvbm.tiers.remote.drivers.credentials import Credentials

BLOB_BYTES_MAX = 4 << 20
"""The server does nothing else while it copies a value."""
PAGE = 500

# Both take the keys of names and facts, and the prefix of the blobs.
_NOTE = """
local blob = ARGV[1] .. ARGV[2]
if redis.call('EXISTS', blob) == 0 then return 0 end
if ARGV[3] == 'touch' or not redis.call('ZSCORE', KEYS[1], ARGV[2]) or redis.call('HEXISTS', KEYS[2], ARGV[2]) == 0 then
  local time = redis.call('TIME')
  redis.call('ZADD', KEYS[1], 0, ARGV[2])
  redis.call('HSET', KEYS[2], ARGV[2], redis.call('STRLEN', blob) .. ' ' .. time[1] .. ' ' .. time[2])
  if ARGV[3] == 'touch' then redis.call('TOUCH', blob) end
end
return 1
"""
"""Write down a blob that is there, unless it is written down. `touch`: with the time of now."""

_FORGET = """
for i = 2, #ARGV do
  if redis.call('EXISTS', ARGV[1] .. ARGV[i]) == 0 then
    redis.call('ZREM', KEYS[1], ARGV[i])
    redis.call('HDEL', KEYS[2], ARGV[i])
  end
end
return 1
"""
"""Forget the names of blobs that have gone."""

_PAGE = """
local names = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[2], ARGV[3], 'LIMIT', 0, ARGV[4])
local found = {}
for i, name in ipairs(names) do
  found[2 * i - 1] = name
  found[2 * i] = ''
  if redis.call('EXISTS', ARGV[1] .. name) == 1 then
    found[2 * i] = redis.call('HGET', KEYS[2], name) or ''
  end
end
return found
"""
"""A page of names, each with its size and time, or with nothing where the blob has gone."""

_Answer = TypeVar("_Answer")


def connections(
    host: str,
    port: int,
    database: int,
    credentials: Credentials,
    *,
    tls: bool,
    ca: str | None,
    deadline_s: float,
    count: int,
) -> valkey.ConnectionPool:
    """Connections to one server, at most `count`; who needs one more waits up to the deadline.

    The deadline is that of each time that the server is waited for: one that sends a little now and then is waited for
    longer. A request is sent once more where the connection had been ended, by a restart of the server, say.
    """
    secure = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": ca} if tls else {}
    pool: Any = valkey.BlockingConnectionPool
    made: valkey.ConnectionPool = pool(
        connection_class=valkey.SSLConnection if tls else valkey.Connection,
        max_connections=count,
        timeout=deadline_s,
        host=host,
        port=port,
        db=database,
        username=credentials.user or None,
        password=credentials.secret or None,
        socket_timeout=deadline_s,
        socket_connect_timeout=min(5.0, deadline_s / 2),
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 1),
        retry_on_error=[exceptions.ConnectionError],
        **secure,
    )
    return made


class RedisBlobs:
    """See `kvbm.tiers.remote.blobs.BlobStore`. `pool` has the server's address, credentials and deadlines."""

    def __init__(
        self,
        pool: valkey.ConnectionPool,
        place: str,
        prefix: str,
        *,
        blob_bytes_max: int = BLOB_BYTES_MAX,
    ) -> None:
        self.place = place
        self.blob_bytes_max = blob_bytes_max
        self.notes: tuple[str, ...] = ()
        # Its calls answer "perhaps an awaitable" to a type checker.
        self._client: Any = valkey.Valkey(connection_pool=pool)
        self._pool = pool
        self._blob = prefix + "blob/"
        self._keys = (prefix + "names", prefix + "facts")
        self._requests: Counter[str] = Counter()
        self._counting = threading.Lock()

    def put(self, name: str, parts: Sequence[Buffer]) -> Put:
        """See `BlobStore`."""
        assert valid_name(name)

        def both() -> Put:
            with self._client.pipeline(transaction=True) as together:
                together.set(self._blob + name, b"".join(parts), nx=True)
                together.eval(_NOTE, 2, *self._keys, self._blob, name, "put")
                created = together.execute()[0]
            return Put.CREATED if created else Put.EXISTS

        return self._do("put", name, both)

    def read(self, name: str, start: int, end: int) -> Buffer | None:
        """See `BlobStore`."""
        assert 0 <= start < end
        found: bytes = self._do("get", name, lambda: self._client.getrange(self._blob + name, start, end - 1))
        return found if found or self._there(name) else None

    def read_end(self, name: str, length: int) -> tuple[Buffer, int] | None:
        """See `BlobStore`."""
        assert length > 0

        def both() -> tuple[bytes, int]:
            with self._client.pipeline(transaction=True) as together:
                together.getrange(self._blob + name, -length, -1)
                together.strlen(self._blob + name)
                last, size = together.execute()
            return last, size

        found = self._do("get", name, both)
        return found if found[1] or self._there(name) else None

    def listing(self, prefix: str) -> Iterator[BlobInfo]:
        """See `BlobStore`."""
        assert not prefix or prefix.endswith("/")
        begin, end = (f"[{prefix}", f"({prefix[:-1]}0") if prefix else ("-", "+")  # "0" comes after "/"
        while True:
            page = self._do("list", prefix, lambda begin=begin: self._page(begin, end))  # type: ignore[misc]
            names = [name.decode() for name in page[::2]]
            facts = page[1::2]
            gone = [name for name, fact in zip(names, facts, strict=True) if not fact]
            for name, fact in zip(names, facts, strict=True):
                if fact:
                    size, seconds, micros = fact.split()
                    yield BlobInfo(name, int(size), int(seconds) + int(micros) / 1e6)
            if gone:
                self._do("list", prefix, lambda gone=gone: self._eval(_FORGET, self._blob, *gone))  # type: ignore[misc]
            if len(names) < PAGE:
                return
            begin = f"({names[-1]}"

    def touch(self, name: str) -> None:
        """See `BlobStore`."""
        self._do("put", name, lambda: self._eval(_NOTE, self._blob, name, "touch"))

    def delete(self, names: Sequence[str]) -> None:
        """See `BlobStore`."""
        for begin in range(0, len(names), PAGE):
            some = names[begin : begin + PAGE]

            def together(some: Sequence[str] = some) -> None:
                with self._client.pipeline(transaction=True) as transaction:
                    transaction.unlink(*(self._blob + name for name in some))
                    transaction.eval(_FORGET, 2, *self._keys, self._blob, *some)
                    transaction.execute()

            self._do("delete", f"{some[0]} and {len(some) - 1} more", together)

    def now_s(self) -> float:
        """See `BlobStore`."""
        seconds, micros = self._do("get", "the time", self._client.time)
        return int(seconds) + int(micros) / 1e6

    def requests(self) -> dict[str, int]:
        """See `BlobStore`. Each is a round trip."""
        with self._counting:
            return {kind: self._requests[kind] for kind in ("put", "get", "list", "delete")}

    def close(self) -> None:
        """See `BlobStore`."""
        self._pool.disconnect()

    def _there(self, name: str) -> bool:
        """Whether there is such a blob; forgets its name where there is none."""

        def both() -> bool:
            with self._client.pipeline(transaction=True) as together:
                together.exists(self._blob + name)
                together.eval(_FORGET, 2, *self._keys, self._blob, name)
                return bool(together.execute()[0])

        return self._do("get", name, both)

    def _page(self, begin: str, end: str) -> list[bytes]:
        found: list[bytes] = self._eval(_PAGE, self._blob, begin, end, str(PAGE))
        return found

    def _eval(self, script: str, *words: str) -> Any:
        return self._client.eval(script, 2, *self._keys, *words)

    def _do(self, kind: str, name: str, ask: Callable[[], _Answer]) -> _Answer:
        """One round trip, counted. Raises StoreError."""
        with self._counting:
            self._requests[kind] += 1
        try:
            return ask()
        except exceptions.ValkeyError as error:
            trouble, said = _judged(error)
            # Not chained, and not the client's own text: it may hold what no log shall.
            raise StoreError(trouble, f"{self.place}: {kind} {name}: {said}") from None


def _judged(error: exceptions.ValkeyError) -> tuple[StoreTrouble, str]:
    text = str(error)
    if isinstance(error, exceptions.TimeoutError):
        return "slow", "no answer within the deadline"
    if isinstance(
        error, (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)
    ) or text.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
        return "refused", "the server refuses this user or password, or their rights"
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM" in text or "maxmemory" in text:
        return "full", "the server has no memory left and evicts nothing"
    if isinstance(error, exceptions.ConnectionError):
        if "max number of clients" in text:
            return "throttled", "the server has too many clients"
        if "certificate" in text.lower() or "ssl" in text.lower():
            return "refused", "no TLS with this server (its certificate, or `redis` where it wants `rediss`)"
        return "unreachable", "the server cannot be reached"
    if text.startswith(("MOVED", "CROSSSLOT", "CLUSTERDOWN")):
        return "failed", "a Redis Cluster is not supported: name one server"
    if isinstance(error, exceptions.ReadOnlyError):
        return "refused", "this server is a replica that takes no writes"
    return "failed", f"the server answers with an error ({type(error).__name__})"
