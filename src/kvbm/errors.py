"""Operating errors: each is one line that names the operation, the field or resource, and what is accepted.

Programmer errors are assertions, not these.
"""

from __future__ import annotations


class KvbmError(Exception):
    """Base of every error that kvbm raises on purpose."""


class SettingsError(KvbmError, ValueError):
    """A setting that cannot be used.

    The message is one line: the field as the user wrote it, the value found, and what is accepted.
    """

    def __init__(self, field: str, value: object, accepted: str) -> None:
        super().__init__(f"{field}={value!r} cannot be used: {accepted}")
        self.field = field
        self.value = value
        self.accepted = accepted


class TierError(KvbmError):
    """A tier's medium failed (disk full, EIO, read-only, gone). The tier turns off, the engine goes on."""


class SpaceFailed(KvbmError):
    """A defect, ours or an installed policy's, while a namespace's blocks were indexed. Nobody else's are touched."""


class DeviceLost(KvbmError):
    """The device's context has gone: nothing can be copied to or from it in this process any more."""


class CopyHung(KvbmError):
    """A copy does not end: its targets may be written at any later time, and must not be used for anything else."""


class ManagerRefused(KvbmError):
    """The manager answered and said no: another version, another namespace, another user."""


class ManagerUntrusted(ManagerRefused):
    """The other end, or its place in the file system, may be another user's: refused. The engine serves without us."""


class ManagerUnavailable(KvbmError):
    """No manager could be reached within the deadline."""


class ManagerUnclear(KvbmError):
    """Several managers run, and none is named."""


class MessageTooLong(KvbmError):
    """A message over the bound of its protocol; it was not sent."""


class ProtocolError(KvbmError):
    """A message that is not one of `protocol`'s, or is over its bound."""
