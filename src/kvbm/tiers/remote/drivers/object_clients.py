"""Clients of object stores: `obstore`'s, made of a URL's parts, with deadlines and the cloud's own credentials.

Credentials come from where each cloud has them (the environment, a role, a metadata service), which `obstore` looks
through by itself, from a profile of AWS (`aws_profile`), or are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from kvbm.tiers.remote.drivers.credentials import Credentials

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

    from kvbm.tiers.remote.drivers.aws_profile import ProfileCredentials

RETRIES = 2


def s3(
    bucket: str,
    prefix: str,
    options: Mapping[str, str],
    keys: Credentials,
    deadline_s: float,
    profile: ProfileCredentials | None = None,
) -> S3Store:
    """A bucket of S3, or of a server that speaks it (`endpoint`). `profile` is asked for
    credentials, and goes without `keys`."""
    config: dict[str, Any] = {}
    for option, key in (("region", "region"), ("endpoint", "endpoint")):
        if option in options:
            config[key] = options[option]
    if options.get("virtual-host") == "yes":
        config["virtual_hosted_style_request"] = True
    if options.get("bulk-delete") == "no":
        config["disable_bulk_delete"] = True
    if _express(bucket):
        config["s3_express"] = True
    if keys.user and keys.secret:
        config["access_key_id"], config["secret_access_key"] = keys.user, keys.secret
    if profile is not None and profile.region:
        config.setdefault("region", profile.region)
    return S3Store(
        bucket,
        prefix=prefix or None,
        config=config,  # type: ignore[arg-type]  # names as obstore has them, of one type each
        client_options=_client(options, deadline_s),
        retry_config=_retries(deadline_s),
        credential_provider=profile,
    )


def gcs(bucket: str, prefix: str, options: Mapping[str, str], deadline_s: float) -> GCSStore:
    """A bucket of Google Cloud Storage."""
    config: dict[str, Any] = {"base_url": options["endpoint"]} if "endpoint" in options else {}
    return GCSStore(
        bucket,
        prefix=prefix or None,
        config=config,  # type: ignore[arg-type]  # names as obstore has them, of one type each
        client_options=_client(options, deadline_s),
        retry_config=_retries(deadline_s),
    )


def azure(
    container: str, prefix: str, options: Mapping[str, str], keys: Credentials, deadline_s: float
) -> AzureStore:
    """A container of Azure Blob Storage."""
    config: dict[str, Any] = {}
    for option, key in (("account", "account_name"), ("endpoint", "endpoint")):
        if option in options:
            config[key] = options[option]
    if keys.secret:
        config["account_key"] = keys.secret
    return AzureStore(
        container,
        prefix=prefix or None,
        config=config,  # type: ignore[arg-type]  # names as obstore has them, of one type each
        client_options=_client(options, deadline_s),
        retry_config=_retries(deadline_s),
    )


def local(root: Path) -> LocalStore:
    """A directory as an object store, for comparison. It keeps no deadline."""
    return LocalStore(root, mkdir=True)


def lists_in_order(bucket: str) -> bool:
    """Whether a bucket lists its objects in the order of their names: all but S3 Express do."""
    return not _express(bucket)


def _express(bucket: str) -> bool:
    return bucket.endswith("--x-s3")


def _client(options: Mapping[str, str], deadline_s: float) -> ClientConfig:
    # A try and the time in which another may begin are the deadline together.
    client: ClientConfig = {
        "timeout": timedelta(seconds=0.6 * deadline_s),
        "connect_timeout": timedelta(seconds=min(5.0, 0.25 * deadline_s)),
    }
    if options.get("endpoint", "").startswith("http://"):
        client["allow_http"] = True
    if "ca" in options:
        client["root_certificate"] = Path(options["ca"]).read_bytes()
    return client


def _retries(deadline_s: float) -> RetryConfig:
    return {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=0.4 * deadline_s)}
