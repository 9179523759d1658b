"""Credentials of AWS profiles: written keys, assumed roles, single sign-on, programs, as `botocore` finds them.

`obstore` reads no profile. It asks a `ProfileCredentials` in the thread of a request, and all other requests of the
store wait for that answer. So `botocore`, which may ask a server or run a program, works in a thread of its own, and
who asked waits a bounded time for it. Nothing of what it finds or says is shown but the kind of an error.

obstore's own provider for boto3 is not used: it waits as long as `botocore` does, promises 30 minutes of what may end
sooner, and needs Python 3.11.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvbm.errors import SettingsError
from kvbm.settings import AwsEnvironment
from kvbm.tiers.remote.blobs import StoreError

if TYPE_CHECKING:
    from obstore.store import S3Credential

log = logging.getLogger("kvbm.tiers.remote.tier")

EXTRA = "pip install openkvbm[remote-aws]"
PATIENCE_S_MAX = 10.0
FRESH = timedelta(minutes=5)
"""After so long they are asked for again. What `botocore` can renew it gives away for 10 minutes or more."""
KEPT = timedelta(minutes=9)
"""So long they are used where renewing them fails."""
KEPT_STEP = timedelta(seconds=15)
"""Meanwhile it is tried again so often."""
AHEAD = timedelta(minutes=5)
"""`obstore` asks again so long before the end that it was told: it is told an end that much later."""
LEFT_AFTER = 3
"""A search is given up after so many times what a request waits for it."""
SEARCHES_MAX = 4
"""So many hang at most. Then another begins when one of them ends."""
PROFILES_SHOWN = 20

Session = Any
"""A session of `botocore`, which has no types."""


class WantedProfile(NamedTuple):
    """A profile that is to be used; `name` is empty for the default one, which nobody asked for by name.

    `field` and `value` are how the user named it.
    """

    name: str
    by_url: bool
    field: str
    value: str

    @property
    def what(self) -> str:
        """In words."""
        return f"AWS profile {self.name!r}" if self.name else "the default AWS profile"


def wanted_profile(by_url: str, field: str, url: str, said: AwsEnvironment) -> WantedProfile | None:
    """The profile that counts, in the order of AWS's own tools; None where `obstore` itself finds what they would find.

    One that the URL names wins over everything in the environment. Otherwise keys in the environment win over a profile
    that it names, and only where it says nothing at all are the files looked into.
    """
    if by_url:
        return WantedProfile(by_url, True, field, url)
    if said.keys:
        return None
    if said.profile:
        return WantedProfile(said.profile, False, said.variable, said.profile)
    if said.workload or not any(path.is_file() for path in said.files):
        return None
    return WantedProfile("", False, field, url)


def open_profile(wanted: WantedProfile, said: AwsEnvironment, deadline_s: float) -> ProfileCredentials | None:
    """What obstore is to ask. Asks nobody itself. None where nobody named a profile and `botocore` is not there.

    Raises SettingsError for a profile that does not exist or cannot be used without a person, and for files that cannot
    be read.
    """
    if importlib.util.find_spec("botocore") is None:
        if wanted.name:
            raise SettingsError(
                wanted.field, wanted.value, f"{wanted.what} needs a package: {EXTRA} (botocore is missing)"
            )
        _say_unread(said.files)
        return None

    def new_session() -> Session:
        import botocore.session

        # A session with a name looks into no variable for keys; without one, at all of them.
        return botocore.session.Session(profile=wanted.name if wanted.by_url else None)

    region = _examined(wanted, new_session(), said.files)
    return ProfileCredentials(
        new_session,
        wanted.what,
        said.files,
        min(deadline_s, PATIENCE_S_MAX),
        # A region that the environment names is obstore's own to find.
        "" if said.region else region,
    )


class ProfileCredentials:
    """Called by obstore when it needs credentials, by one thread at a time. `region` is the profile's, or empty."""

    def __init__(
        self,
        new_session: Callable[[], Session],
        what: str,
        files: Sequence[Path],
        patience_s: float,
        region: str = "",
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self.region = region
        self._new_session = new_session
        self._what = what
        self._files = files
        self._patience_s = patience_s
        self._now = now
        self._search: _Search | None = None
        # Given up, and still under way.
        self._left: list[_Search] = []
        self._kept: _Found | None = None
        # What the next search renews, and the stamps of the files that it came from. One search has it at a time, so
        # that no other waits behind one that hangs.
        self._source: tuple[Any, Sequence[int]] | None = None

    def __repr__(self) -> str:
        return f"ProfileCredentials({self._what})"

    def __call__(self) -> S3Credential:
        """Credentials that are good for now. Raises StoreError, whose line holds no secret."""
        search, patience_s = self._current()
        if not search.ended.wait(patience_s):
            trouble = StoreError("slow", f"{self._what} gave no credentials within {self._patience_s:g} s")
        else:
            self._search = None
            if search.found is not None:
                self._kept = search.found
                return self._until(search.found, search.found.since + FRESH)
            trouble = search.trouble
        now = self._now()
        if self._kept is None or now >= self._kept.since + KEPT:
            raise trouble
        log.warning("remote tier: %s; what it gave before is used on", trouble)
        return self._until(self._kept, min(now + KEPT_STEP, self._kept.since + KEPT))

    def _current(self) -> tuple[_Search, float]:
        """The search that counts, and how long to wait for it: one that somebody waited for already holds up nobody."""
        now, search = self._now(), self._search
        if search is not None and not search.ended.is_set():
            self._left = [left for left in self._left if not left.ended.is_set()]
            age_s = (now - search.begun).total_seconds()
            if age_s < LEFT_AFTER * self._patience_s or len(self._left) + 1 >= SEARCHES_MAX:
                return search, 0.0
            self._left.append(search)
        elif search is not None and not search.is_of_no_use(now):
            return search, 0.0
        search = self._search = _Search(self._find, now)
        return search, self._patience_s

    def _until(self, found: _Found, end: datetime) -> S3Credential:
        """For obstore, which asks again at `end`."""
        return {
            "access_key_id": found.frozen.access_key,
            "secret_access_key": found.frozen.secret_key,
            "token": found.frozen.token,
            "expires_at": end + AHEAD,
        }

    def _find(self) -> _Found:
        """In the searching thread: as `_look`. Raises StoreError for whatever goes wrong."""
        try:
            return self._look()
        except StoreError:
            raise
        except Exception as error:
            # Not chained, and without its text: that may be what a program that knows secrets has printed.
            kind = type(error).__name__
            renew = "; `aws sso login` renews a login" if "SSO" in kind or "Token" in kind else ""
            raise StoreError("refused", f"{self._what} gives no credentials ({kind}){renew}") from None

    def _look(self) -> _Found:
        """What `botocore` has now, which renews what ends. Files are read again when they have changed, and after an
        error."""
        stamps = [_stamp(path) for path in self._files]
        had, self._source = self._source, None
        source = had[0] if had is not None and had[1] == stamps else self._new_session().get_credentials()
        if source is None:
            raise StoreError("refused", f"{self._what} gives no credentials")
        frozen = source.get_frozen_credentials()
        self._source = source, stamps
        return _Found(frozen, self._now())


class _Found(NamedTuple):
    """What `botocore` calls frozen credentials, and since when we have them. Never printed."""

    frozen: Any
    since: datetime


class _Search:
    """One look for credentials, in a daemon thread: one that hangs must not keep the process from ending."""

    def __init__(self, find: Callable[[], _Found], begun: datetime) -> None:
        self.begun = begun
        self.ended = threading.Event()
        self.found: _Found | None = None
        self.trouble = StoreError("refused", "no credentials")
        self._find = find
        threading.Thread(target=self._run, name="kvbm-aws-profile", daemon=True).start()

    def is_of_no_use(self, now: datetime) -> bool:
        """Whether it ended when nobody waited any more, without success or long ago."""
        return self.ended.is_set() and (self.found is None or now >= self.found.since + FRESH)

    def _run(self) -> None:
        try:
            self.found = self._find()
        except StoreError as error:
            self.trouble = error
        finally:
            self.ended.set()


def _examined(wanted: WantedProfile, session: Session, files: Sequence[Path]) -> str:
    """The profile's region. Raises SettingsError as `open_profile` does."""
    from botocore.exceptions import BotoCoreError, ProfileNotFound

    try:
        profile = session.get_scoped_config()
    except ProfileNotFound:
        there = ", ".join(session.available_profiles[:PROFILES_SHOWN]) or "none"
        accepted = f"there is no {wanted.what} in {_paths(files)}; there are: {there}"
        raise SettingsError(wanted.field, wanted.value, accepted) from None
    except (BotoCoreError, OSError, UnicodeError) as error:
        accepted = f"AWS profiles in {_paths(files)} cannot be read ({type(error).__name__})"
        raise SettingsError(wanted.field, wanted.value, accepted) from None
    if profile.get("role_arn") and profile.get("mfa_serial"):
        accepted = f"{wanted.what} asks for a code of a person (mfa_serial), and nobody is here to give it"
        raise SettingsError(wanted.field, wanted.value, accepted)
    return str(profile.get("region", ""))


def _stamp(path: Path) -> int:
    """When a file was written, in nanoseconds; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _paths(files: Sequence[Path]) -> str:
    return " or ".join(map(str, files))


@functools.cache
def _say_unread(files: tuple[Path, ...]) -> None:
    """Once in a process."""
    log.warning("AWS profiles in %s are not read: that needs a package: %s", _paths(files), EXTRA)
