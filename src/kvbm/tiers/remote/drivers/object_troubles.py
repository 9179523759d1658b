"""What went wrong at an object store, from an error of `obstore`: its kind, and one line that holds no secret.

Errors come with the server's own text and the URL of the request. Both can hold credentials (a signed URL, the key that
did not fit), so only the status, the error's code and a few known words are taken from them.
"""

from __future__ import annotations

import re

from kvbm.tiers.remote.blobs import StoreError, StoreTrouble

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,60})\s*</Code>")
_REFUSED_CODES = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "AccessDenied",
    "ExpiredToken",
    "InvalidToken",
}
_PROVIDER = re.compile(r"External AWS credential provider: StoreError: ([^\n]+)")
"""A line of our own (see `aws_profile`), which holds no secret."""
_THROTTLED_CODES = {"SlowDown", "TooManyRequests", "ServerBusy", "RequestLimitExceeded", "Throttling"}
_FULL_CODES = {"QuotaExceeded", "XMinioStorageFull", "EntityTooLarge", "InsufficientCapacity"}
_NO_STORE_CODES = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"}
_METADATA_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "fd00:ec2::254")


def status_of(error: BaseException) -> int:
    """The HTTP status of the answer; 0 where there was none."""
    found = _STATUS.search(str(error))
    return int(found.group(1)) if found else 0


def is_no_store(error: BaseException) -> bool:
    """Whether it is the bucket or container that is not there, and not the blob."""
    return _code(str(error)) in _NO_STORE_CODES


def ignores_ranges(error: BaseException) -> bool:
    """Whether the store answered with the whole blob where a range was asked for."""
    return "non-partial response" in str(error)


def trouble_of(error: BaseException, place: str, what: str) -> StoreError:
    """The StoreError that says the same. `what` was asked for, e.g. `put packs/ab/0123`."""
    text = str(error)
    status, code = status_of(error), _code(text)
    trouble, said = _judged(type(error).__name__, text, status, code)
    answer = " ".join(word for word in (str(status) if status else "", code) if word)
    return StoreError(trouble, f"{place}: {what}: {said}" + (f" ({answer})" if answer else ""))


def _judged(kind: str, text: str, status: int, code: str) -> tuple[StoreTrouble, str]:
    if (told := _PROVIDER.search(text)) is not None:
        return "refused", told.group(1)
    if any(host in text.partition("Debug source")[0] for host in _METADATA_HOSTS):
        return "refused", "no credentials were found"
    if code in _NO_STORE_CODES:
        return "failed", "there is no such bucket"
    refused = kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403)
    if code in _FULL_CODES or status == 507:
        return "full", "the store has no room"
    if code in _THROTTLED_CODES or status in (429, 503):
        return "throttled", "the store asks for fewer requests"
    if refused or code in _REFUSED_CODES:
        return "refused", "the store refuses these credentials or their rights"
    if status:
        return "failed", "the store answers with an error"
    if "without LOCATION" in text:
        return "failed", "the bucket is in another region"
    if "TimedOut" in text or "kind: Timeout" in text or "operation timed out" in text:
        return "slow", "no answer within the deadline"
    if "HTTP error" in text or "error sending request" in text or "Connect" in text:
        return "unreachable", "the store cannot be reached"
    if "No space left" in text or "os error 28" in text:
        return "full", "the store has no room"
    return "failed", f"the client gave up ({kind})"


def _code(text: str) -> str:
    found = _CODE.search(text)
    return found.group(1) if found else ""
