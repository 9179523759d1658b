"""Blobs as values of one Redis or Valkey server.

Keys: `<prefix>blob/<name>` for each blob, and the *index* `<prefix>names`: for each blob a word of its name, size and
time by the server's clock, in the order of the names. A blob and its word change in one transaction or script, so they
agree. Where the server evicts: a blob that has gone is not listed, and its word goes when either is looked for; where
the index has gone, a listing makes it again of the keys that are there.

A cluster is refused: the keys of one store do not all lie on one of its nodes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
DAMAGED = (ValueError, IndexError)
"""What the client raises of an answer that it cannot convert."""

# A word is "name size seconds microseconds". A space comes before all letters of names, and `!` next: so words are in
# the order of names, and those of one name lie between "name " and "name!".
_COMPLETE = "!"
"""A word of the index that says that it has all blobs: one that was begun after an eviction has it not."""

_NOTE = """
for i = 3, #ARGV do
  local blob, name = ARGV[1] .. ARGV[i], ARGV[i]
  if redis.call('EXISTS', blob) == 1 then
    local words = redis.call('ZRANGEBYLEX', KEYS[1], '[' .. name .. ' ', '(' .. name .. '!')
    if ARGV[2] == 'touch' or #words == 0 then
      for _, word in ipairs(words) do redis.call('ZREM', KEYS[1], word) end
      local time = redis.call('TIME')
      local size = redis.call('STRLEN', blob)
      redis.call('ZADD', KEYS[1], 0, name .. ' ' .. size .. ' ' .. time[1] .. ' ' .. time[2])
      redis.call('TOUCH', blob)
    end
  end
end
return 1
"""
"""Write down blobs that are there, unless they are written down. `touch`: with the time of now all the same."""

_FORGET = """
for i = 2, #ARGV do
  if redis.call('EXISTS', ARGV[1] .. ARGV[i]) == 0 then
    redis.call('ZREMRANGEBYLEX', KEYS[1], '[' .. ARGV[i] .. ' ', '(' .. ARGV[i] .. '!')
  end
end
return 1
"""
"""Forget the words of blobs that have gone."""

_PAGE = """
local words = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[2], ARGV[3], 'LIMIT', 0, ARGV[4])
local found = {words[#words] or '', #words == tonumber(ARGV[4]) and 1 or 0}
for _, word in ipairs(words) do
  if redis.call('EXISTS', ARGV[1] .. string.match(word, '^[^ ]+')) == 1 then
    found[#found + 1] = word
  else
    redis.call('ZREM', KEYS[1], word)
  end
end
return found
"""
"""The last word of a page, whether there may be more, and the words of those blobs that are there."""

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
        self._names = prefix + "names"
        self._requests: Counter[str] = Counter()
        self._counting = threading.Lock()

    def put(self, name: str, parts: Sequence[Buffer]) -> Put:
        """See `BlobStore`."""
        assert valid_name(name)

        def both() -> Put:
            with self._client.pipeline(transaction=True) as together:
                together.set(self._blob + name, b"".join(parts), nx=True)
                together.eval(_NOTE, 1, self._names, self._blob, "put", name)
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
        if self._do("list", prefix, lambda: self._client.zscore(self._names, _COMPLETE)) is None:
            self._complete()
        begin, end = (
            (f"[{prefix}", f"({prefix[:-1]}0") if prefix else (f"({_COMPLETE}", "+")
        )  # "0" comes after "/"
        more = True
        while more:
            last, more, *words = self._do("list", prefix, partial(self._page, begin, end))
            for word in words:
                name, size, seconds, micros = word.decode().split()
                yield BlobInfo(name, int(size), int(seconds) + int(micros) / 1e6)
            # After every word of that name: one that is touched meanwhile gets another.
            begin = f"({last.decode().partition(' ')[0]}!"

    def touch(self, name: str) -> None:
        """See `BlobStore`."""
        self._do("put", name, lambda: self._eval(_NOTE, self._blob, "touch", name))

    def delete(self, names: Sequence[str]) -> None:
        """See `BlobStore`."""
        for begin in range(0, len(names), PAGE):
            some = names[begin : begin + PAGE]

            def together(some: Sequence[str] = some) -> None:
                with self._client.pipeline(transaction=True) as transaction:
                    transaction.unlink(*(self._blob + name for name in some))
                    transaction.eval(_FORGET, 1, self._names, self._blob, *some)
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
                together.eval(_FORGET, 1, self._names, self._blob, name)
                return bool(together.execute()[0])

        return self._do("get", name, both)

    def _complete(self) -> None:
        """Write down every blob that is there: the index is new, or the server has evicted the one that was."""
        cursor = 0
        while True:
            some = partial(self._client.scan, cursor, match=f"{self._blob}*", count=PAGE)
            cursor, keys = self._do("list", "", some)
            if keys:
                names = [key.decode()[len(self._blob) :] for key in keys]
                self._do("list", "", partial(self._eval, _NOTE, self._blob, "put", *names))
            if not cursor:
                break
        self._do("list", "", lambda: self._client.zadd(self._names, {_COMPLETE: 0}))

    def _page(self, begin: str, end: str) -> list[Any]:
        found: list[Any] = self._eval(_PAGE, self._blob, begin, end, str(PAGE))
        return found

    def _eval(self, script: str, *words: str) -> Any:
        return self._client.eval(script, 1, self._names, *words)

    def _do(self, kind: str, name: str, ask: Callable[[], _Answer]) -> _Answer:
        """One round trip, counted. Raises StoreError."""
        with self._counting:
            self._requests[kind] += 1
        try:
            return ask()
        except (exceptions.ValkeyError, *DAMAGED) as error:
            trouble, said = _judged(error)
            # Not chained, and not the client's own text: it may hold what no log shall.
            raise StoreError(trouble, f"{self.place}: {kind} {name}: {said}") from None


def _judged(error: Exception) -> tuple[StoreTrouble, str]:
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
