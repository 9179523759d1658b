"""Settings → the remote tiers of a namespace. Nothing here waits for a store."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from kvbm.clock import Clock
from kvbm.errors import SettingsError
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.choices import choose_admission
from kvbm.manager.write_behind import RemoteRules
from kvbm.policy import AdmissionPolicy
from kvbm.settings import HIDDEN, Settings, variable
from kvbm.tiers.remote.blob_tier import open_blob_tier
from kvbm.tiers.remote.blobs import BlobStore
from kvbm.tiers.remote.contract import RemoteTier
from kvbm.tiers.remote.named_store import open_named_store
from kvbm.tiers.remote.options import RemoteOptions
from kvbm.tiers.remote.sealing import MasterKey, Seal, Sealer
from kvbm.tiers.remote.sealing_keys import keys_from_command, keys_from_file

KEY_COMMAND_S = 30.0
REQUEST_S_MIN = 10.0
"""A request may take this long, or as long as a read where that is longer: writes are large, and nobody waits."""


class RemoteOpening:
    """Opens the remote tier of each namespace that comes. Owned by the manager's thread."""

    def __init__(self, settings: Settings, clock: Clock, named: Callable[[str], str] = variable) -> None:
        """`named` is what the user calls a setting. Raises SettingsError for whatever of the settings cannot be used,
        before anything is opened."""
        assert settings.remote_on
        self._settings = settings
        self._clock = clock
        self._named = named
        choose_admission(named("remote_admission"), settings.remote_admission, 1, clock())
        self._keys: list[MasterKey] = _keys(settings, named)
        if self._keys:
            Sealer(self._keys)
        self.store().close()

    def open(
        self, namespace: Namespace, layout: BlockLayout, share: int
    ) -> list[tuple[RemoteTier, RemoteRules, AdmissionPolicy]]:
        """The remote tiers of a namespace, with what is done with each; it has one of `share` equal parts of all
        bounds that are this manager's. An ephemeral one has none: nobody else could ever ask for its blocks."""
        settings = self._settings
        if namespace.ephemeral:
            return []
        options = RemoteOptions(
            load_deadline_s=settings.remote_deadline_ms / 1000,
            catalogue_blocks=max(1, settings.remote_known_blocks // share),
            collect=settings.remote_collect,
            ttl_s=settings.remote_ttl_hours * 3600.0,
            capacity_bytes=settings.remote_bytes or None,
        )
        seal: Seal | None = Sealer(self._keys) if self._keys else None
        tier = open_blob_tier(self.store(), layout, namespace, options, self._clock, seal=seal)
        rules = RemoteRules(
            writes=settings.remote_write,
            linger_s=float(settings.remote_linger_s),
            bytes_per_hour=settings.remote_write_bytes // share,
            requests_per_hour=-(-settings.remote_requests // share),
            known_tenants_only=seal is not None,
        )
        admission = choose_admission(
            self._named("remote_admission"),
            settings.remote_admission,
            options.catalogue_blocks,
            self._clock(),
        )
        return [(tier, rules, admission)]

    def store(self) -> BlobStore:
        """The store that the settings name. Nothing is sent."""
        deadline_s = max(REQUEST_S_MIN, self._settings.remote_deadline_ms / 1000)
        return open_named_store(self._settings, self._clock, deadline_s, named=self._named)


def _keys(settings: Settings, named: Callable[[str], str]) -> list[MasterKey]:
    """The keys that seal. Raises SettingsError."""
    keys, field = list[MasterKey](), named("remote_key_command")
    if settings.remote_key_file and settings.remote_key_command:
        raise SettingsError(field, HIDDEN, f"without {named('remote_key_file')}")
    if settings.remote_key_file:
        keys = keys_from_file(settings.remote_key_file, named("remote_key_file"))
    if settings.remote_key_command:
        keys = keys_from_command(_words(field, settings.remote_key_command), KEY_COMMAND_S, field)
    if keys and not settings.salt_share:
        source = named("remote_key_file" if settings.remote_key_file else "remote_key_command")
        accepted = f"above 0 with {source}: each tenant's blocks have a key of their own"
        raise SettingsError(named("salt_share"), settings.salt_share, accepted)
    return keys


def _words(field: str, command: str) -> Sequence[str]:
    """The program and its arguments, which may have secrets and are not shown. Raises SettingsError."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SettingsError(field, HIDDEN, f"a program and its arguments ({error})") from None
    if not words:
        raise SettingsError(field, HIDDEN, "a program and its arguments")
    return words
