"""The store that the settings name, for the manager and for commands that look after it. Nothing waits for it."""

from __future__ import annotations

from collections.abc import Callable

from kvbm.clock import Clock
from kvbm.settings import Settings, variable
from kvbm.tiers.remote.blobs import BlobStore
from kvbm.tiers.remote.drivers.credentials import NOBODY, Credentials
from kvbm.tiers.remote.drivers.opening import object_url, open_blobs


def open_named_store(
    settings: Settings,
    clock: Clock,
    deadline_s: float,
    url: str = "",
    named: Callable[[str], str] = variable,
) -> BlobStore:
    """The store of these settings, whose requests take `deadline_s` at most, or the one at `url`.

    There must be one (`Settings.remote_on`). Raises SettingsError, which names the setting as its user does, or `URL`.
    """
    credentials = NOBODY
    if settings.object_access_key or settings.object_secret_key:
        credentials = Credentials(settings.object_access_key or "", settings.object_secret_key or "")
    return open_blobs(
        url or settings.remote or _bucket_url(settings),
        clock=clock,
        deadline_s=deadline_s,
        credentials=credentials,
        field="URL" if url else store_field(settings, named),
    )


def store_field(settings: Settings, named: Callable[[str], str] = variable) -> str:
    """What names the store: a variable, or a setting as its user calls it."""
    return named("remote" if settings.remote or not settings.object_on else "object_bucket")


def _bucket_url(settings: Settings) -> str:
    """The store that the original's variables name. One bucket for all ranks, whose parts lie together."""
    bucket = (settings.object_bucket or "").replace("{worker_id}", "0")
    return object_url(bucket, endpoint=settings.object_endpoint or "", region=settings.object_region or "")
