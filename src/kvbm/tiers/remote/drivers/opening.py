"""A store of blobs by its URL, as `--remote` has it. Nothing is sent: a store that is away is no error here.

    s3://bucket/prefix?region=&endpoint=&profile=&virtual-host=yes&bulk-delete=no&ca=
    gs://bucket/prefix?endpoint=&ca=
    az://container/prefix?account=&endpoint=&ca=
    file:///path?fsync=yes
    redis://user:password@host:port/db?prefix=     also rediss, valkey, valkeys; ?ca= with TLS
    mooncake://master:port?index=URL&prefix=&metadata=&protocol=tcp&device=&segment=0&host=&replicas=1

`index`: the store, by its URL, that has the names of what lies in Mooncake; its own `&` is written `%26`.
`segment`: the memory that this node gives to the pool: 0, or as 4GiB. `metadata`: P2PHANDSHAKE, or as Mooncake has it.

`profile`: one of AWS's files of profiles, whatever the environment says.
`ca`: a file with the certificate of who signs the server's, beside those that the system trusts.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from kvbm.clock import Clock, monotonic
from kvbm.errors import SettingsError
from kvbm.settings import STORE_OPTIONS, aws_environment, process_environment, without_credentials
from kvbm.tiers.remote.blobs import BlobStore
from kvbm.tiers.remote.drivers.credentials import NOBODY, Credentials
from kvbm.tiers.remote.drivers.directory import DirectoryBlobs

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from kvbm.tiers.remote.drivers.aws_profile import ProfileCredentials

DEADLINE_S = 10.0
REDIS_PORT = 6379
REDIS_CONNECTIONS = 32
MOONCAKE_PORT = 50051
MOONCAKE_REPLICAS_MAX = 8

_YES_NO = ("virtual-host", "bulk-delete", "fsync")
_OBJECTS = ("s3", "gs", "az")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_SEGMENT = re.compile(r"([1-9][0-9]{0,6})(MiB|GiB)")
_WORD = re.compile(r"[A-Za-z0-9_.:,/-]+")
_PREFIX = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Place(NamedTuple):
    """The parts of a URL, examined."""

    scheme: str
    host: str
    port: int | None
    path: str
    """Without slashes at its ends, but for `file`."""
    options: Mapping[str, str]
    credentials: Credentials
    """Of `mooncake`, those of its index."""

    @property
    def shown(self) -> str:
        """The URL without credentials."""
        where = self.host + (f":{self.port}" if self.port is not None else "")
        path = self.path if self.scheme == "file" else f"/{self.path}" if self.path else ""
        options = f"?{urlencode(self.options, safe='/:')}" if self.options else ""
        return f"{self.scheme}://{where}{quote(path)}{options}"


def open_blobs(
    url: str,
    *,
    clock: Clock = monotonic,
    deadline_s: float = DEADLINE_S,
    credentials: Credentials = NOBODY,
    blob_bytes_max: int | None = None,
    field: str = "remote",
) -> BlobStore:
    """The store at `url`. `credentials` where the URL has none and the store's own way of finding them shall not count.

    Raises SettingsError, naming `field`, for whatever of the URL cannot be used or needs a package that is not there.
    """
    place = parsed(url, field)
    if place.scheme == "mooncake":
        return _open_mooncake(place, clock, deadline_s, credentials, blob_bytes_max, field)
    if place.scheme == "file":
        directory = DirectoryBlobs(
            Path(place.path), clock, deadline_s=deadline_s, fsync=place.options.get("fsync") == "yes"
        )
        directory.blob_bytes_max = min(directory.blob_bytes_max, blob_bytes_max or directory.blob_bytes_max)
        return directory
    opener: Callable[[Place, Clock, float, Credentials, str], BlobStore]
    opener = _open_objects if place.scheme in _OBJECTS else _open_redis
    store = opener(place, clock, deadline_s, credentials, field)
    store.blob_bytes_max = min(store.blob_bytes_max, blob_bytes_max or store.blob_bytes_max)
    return store


def parsed(url: str, field: str = "remote") -> Place:
    """A URL's parts. Raises SettingsError."""
    shown = without_credentials(url)
    try:
        parts = urlsplit(url)
        port = parts.port
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise SettingsError(field, shown, f"this is no URL ({type(error).__name__})") from None
    scheme = parts.scheme
    if scheme not in STORE_OPTIONS:
        raise SettingsError(
            field, shown, f"it begins with one of {', '.join(f'{name}://' for name in STORE_OPTIONS)}"
        )
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    named = Credentials(unquote(parts.username or ""), unquote(parts.password or ""))
    path = unquote(parts.path)
    if scheme in ("s3", "gs", "az"):
        # `hostname` is in small letters: a bucket that was not is another one.
        host, path = parts.netloc, path.strip("/")
        _require_bucket(host, path, shown, field)
    elif scheme == "file":
        if parts.netloc or not path.startswith("/") or path == "/":
            raise SettingsError(field, shown, "file:///path of a directory that is there, with three slashes")
    elif scheme == "mooncake":
        if not host or path.strip("/") or parts.username is not None:
            raise SettingsError(field, shown, "mooncake://host:port of the master, without a path or a user")
        path = ""
        index = _index(options, shown, field)
        options["index"], named = index.shown, index.credentials
    else:
        path = path.strip("/")
        if not host or (path and not path.isdecimal()):
            raise SettingsError(field, shown, f"{scheme}://host:port/number of the database")
    place = Place(scheme, host, port, path, options, named)
    _require_options(place, shown, field)
    return place


def object_url(bucket: str, *, endpoint: str = "", region: str = "", prefix: str = "") -> str:
    """The URL of a bucket of S3, from what Dynamo's variables say (`DYN_KVBM_OBJECT_BUCKET` and so on)."""
    options = {key: value for key, value in (("region", region), ("endpoint", endpoint)) if value}
    path = f"/{prefix.strip('/')}" if prefix.strip("/") else ""
    return f"s3://{bucket}{path}" + (f"?{urlencode(options, safe='/:')}" if options else "")


def _require_bucket(host: str, path: str, shown: str, field: str) -> None:
    if "@" in host:
        raise SettingsError(
            field, shown, "credentials are not part of this URL: they come from the environment"
        )
    if not _BUCKET.fullmatch(host):
        raise SettingsError(
            field, shown, "a bucket's name after the two slashes: small letters, digits, . _ -"
        )
    if path and not _PREFIX.fullmatch(path):
        raise SettingsError(field, shown, "a prefix of letters, digits, . _ - and / after the bucket")


def _index(options: Mapping[str, str], shown: str, field: str) -> Place:
    """The store of names beside a Mooncake Store. Looks at the values of the other options too."""
    if not options.get("index"):
        raise SettingsError(
            field,
            shown,
            "Mooncake lists nothing: index=URL names a directory, Redis or bucket for the names of what lies there",
        )
    index = parsed(options["index"], field)
    if index.scheme == "mooncake":
        raise SettingsError(field, shown, "index is a directory, a Redis or a bucket")
    if options.get("protocol", "tcp") not in ("tcp", "rdma"):
        raise SettingsError(field, shown, "protocol is tcp or rdma")
    if options.get("segment", "0") != "0" and not _SEGMENT.fullmatch(options["segment"]):
        raise SettingsError(field, shown, "segment is 0, or as 512MiB or 4GiB")
    if not re.fullmatch(f"[1-{MOONCAKE_REPLICAS_MAX}]", options.get("replicas", "1")):
        raise SettingsError(field, shown, f"replicas is 1 to {MOONCAKE_REPLICAS_MAX}")
    for option in ("metadata", "device", "host"):
        if options.get(option) and not _WORD.fullmatch(options[option]):
            raise SettingsError(field, shown, f"{option} is of letters, digits and _ . : , / -")
    return index


def _require_options(place: Place, shown: str, field: str) -> None:
    known = STORE_OPTIONS[place.scheme]
    for option, value in place.options.items():
        if option not in known:
            raise SettingsError(
                field, shown, f"there is no option {option!r}; {place.scheme} takes {', '.join(known)}"
            )
        if not value:
            raise SettingsError(field, shown, f"{option} is empty")
        if option in _YES_NO and value not in ("yes", "no"):
            raise SettingsError(field, shown, f"{option} is yes or no")
        if option == "ca" and not Path(value).is_file():
            raise SettingsError(field, shown, f"ca is a file with certificates; there is no file {value}")
        if option == "prefix" and not _PREFIX.fullmatch(value.strip("/")):
            raise SettingsError(field, shown, "prefix is of letters, digits, . _ - and /")
        if option == "endpoint" and (not re.match(r"https?://[^/@?#]+(/[^@?#]*)?$", value)):
            raise SettingsError(
                field, shown, "endpoint is http://host:port or https://host:port, without credentials"
            )


def _open_objects(
    place: Place, clock: Clock, deadline_s: float, credentials: Credentials, field: str
) -> BlobStore:
    _require_package("obstore", place, field, "remote-objects")
    from kvbm.tiers.remote.drivers import object_clients as clients
    from kvbm.tiers.remote.drivers.objects import ObjectBlobs, Traits
    from kvbm.tiers.remote.drivers.probing import find_traits

    client: ObjectStore
    kind = Traits()
    common = (place.host, place.path, place.options)
    profile = _profile(place, deadline_s, credentials, field) if place.scheme == "s3" else None
    try:
        if place.scheme == "s3":
            client = clients.s3(*common, credentials, deadline_s, profile)
            kind = kind._replace(
                ordered=clients.lists_in_order(place.host),
                bulk_delete=place.options.get("bulk-delete") != "no",
            )
        elif place.scheme == "gs":
            client = clients.gcs(*common, deadline_s)
            kind = kind._replace(bulk_delete=False)
        else:
            client = clients.azure(*common, credentials, deadline_s)
            kind = kind._replace(bulk_delete=False, suffixes=False)
    except Exception as error:
        # obstore's errors have no common base here; their text may hold what was given.
        raise SettingsError(
            field, place.shown, f"{place.scheme} takes other values ({type(error).__name__})"
        ) from None
    return ObjectBlobs(client, place.shown, clock, kind=kind, find_traits=find_traits)


def _profile(
    place: Place, deadline_s: float, credentials: Credentials, field: str
) -> ProfileCredentials | None:
    """What of AWS's profiles is to be asked for credentials; None where they are given, or obstore finds its own."""
    if credentials.user and credentials.secret:
        return None
    from kvbm.tiers.remote.drivers.aws_profile import open_profile, wanted_profile

    said = aws_environment(process_environment())
    wanted = wanted_profile(place.options.get("profile", ""), field, place.shown, said)
    if wanted is None:
        return None
    return open_profile(wanted, said, deadline_s)


def _open_redis(
    place: Place,
    clock: Clock,  # noqa: ARG001 (the server tells its time at each request)
    deadline_s: float,
    credentials: Credentials,
    field: str,
) -> BlobStore:
    _require_package("valkey", place, field, "remote-redis")
    from kvbm.tiers.remote.drivers.redis import RedisBlobs, connections

    prefix = place.options.get("prefix", "kvbm").strip("/") + "/"
    user = place.credentials.user or credentials.user
    secret = place.credentials.secret or credentials.secret
    pool = connections(
        place.host.strip("[]"),
        place.port or REDIS_PORT,
        int(place.path or 0),
        Credentials(user, secret),
        tls=place.scheme in ("rediss", "valkeys"),
        ca=place.options.get("ca"),
        deadline_s=deadline_s,
        count=REDIS_CONNECTIONS,
    )
    return RedisBlobs(pool, place.shown, prefix)


def _open_mooncake(
    place: Place,
    clock: Clock,
    deadline_s: float,
    credentials: Credentials,
    blob_bytes_max: int | None,
    field: str,
) -> BlobStore:
    # Looked for and not imported: the library lives in a process of its own.
    if importlib.util.find_spec("mooncake") is None:
        raise SettingsError(
            field,
            place.shown,
            "this needs a package: pip install openkvbm[remote-mooncake], or mooncake-transfer-engine with CUDA",
        )
    from kvbm.tiers.remote.drivers.mooncake import MooncakeBlobs
    from kvbm.tiers.remote.drivers.mooncake_calls import MooncakeCalls
    from kvbm.tiers.remote.drivers.mooncake_wire import Setup

    options = place.options
    named = place.credentials
    index = open_blobs(
        options["index"],
        clock=clock,
        deadline_s=deadline_s,
        credentials=named if named.user or named.secret else credentials,
        field=field,
    )
    setup = Setup(
        master=f"{place.host}:{place.port or MOONCAKE_PORT}",
        metadata=options.get("metadata", "P2PHANDSHAKE"),
        protocol=options.get("protocol", "tcp"),
        device=options.get("device", ""),
        segment_bytes=_segment_bytes(options.get("segment", "0")),
        host=options.get("host", ""),
        replicas=int(options.get("replicas", "1")),
    )
    calls = MooncakeCalls(setup, place.shown, deadline_s, clock)
    store = MooncakeBlobs(calls, index, place.shown, options.get("prefix", "kvbm").strip("/"))
    store.blob_bytes_max = min(store.blob_bytes_max, blob_bytes_max or store.blob_bytes_max)
    return store


def _segment_bytes(text: str) -> int:
    found = _SEGMENT.fullmatch(text)
    return int(found[1]) << {"MiB": 20, "GiB": 30}[found[2]] if found else 0


def _require_package(name: str, place: Place, field: str, extra: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise SettingsError(
            field,
            place.shown,
            f"this needs a package: pip install openkvbm[{extra}] ({error.name} is missing)",
        ) from None
