"""What the environment says of who we are at AWS, by the names that all of AWS's own tools read. Holds no secret."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PROFILE_VARIABLES = ("AWS_DEFAULT_PROFILE", "AWS_PROFILE")
"""The first one that is set counts, as in `botocore`."""
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_WORKLOADS = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


class AwsEnvironment(NamedTuple):
    """`keys`: there are an access key and its secret. `workload`: a cluster gave this process an identity.

    `profile` is the one that is named, by `variable`; `files` are where profiles are written, there or not.
    """

    keys: bool = False
    workload: bool = False
    region: bool = False
    profile: str = ""
    variable: str = PROFILE_VARIABLES[-1]
    files: tuple[Path, ...] = ()


def aws_environment(environ: Mapping[str, str]) -> AwsEnvironment:
    """What these variables say; an empty one is unset."""
    variable = next((name for name in PROFILE_VARIABLES if environ.get(name)), PROFILE_VARIABLES[-1])
    home = Path(environ["HOME"]) if environ.get("HOME") else Path("~").expanduser()
    return AwsEnvironment(
        keys=bool(environ.get("AWS_ACCESS_KEY_ID") and environ.get("AWS_SECRET_ACCESS_KEY")),
        workload=any(environ.get(name) for name in _WORKLOADS),
        region=any(environ.get(name) for name in _REGIONS),
        profile=environ.get(variable, ""),
        variable=variable,
        files=(
            Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials").expanduser(),
            Path(environ.get("AWS_CONFIG_FILE") or home / ".aws" / "config").expanduser(),
        ),
    )
