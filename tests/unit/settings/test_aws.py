"""What AWS's variables say of who we are: without secrets, and as AWS's own tools read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbm.settings import aws_environment


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (False, False, False, "")),
        ({"AWS_ACCESS_KEY_ID": "a"}, (False, False, False, "")),
        ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, (True, False, False, "")),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}, (False, True, False, "")),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://x"}, (False, True, False, "")),
        ({"AWS_REGION": "r"}, (False, False, True, "")),
        ({"AWS_DEFAULT_REGION": "r", "AWS_PROFILE": ""}, (False, False, True, "")),
        ({"AWS_PROFILE": "one"}, (False, False, False, "one")),
        ({"AWS_PROFILE": "one", "AWS_DEFAULT_PROFILE": "two"}, (False, False, False, "two")),
    ],
)
def test_who_we_are(variables: dict[str, str], expected: tuple[bool, bool, bool, str]) -> None:
    said = aws_environment({"HOME": "/users/me", **variables})
    assert (said.keys, said.workload, said.region, said.profile) == expected
    assert variables.get(said.variable, "") == said.profile


def test_no_secret_is_kept() -> None:
    said = aws_environment({"AWS_ACCESS_KEY_ID": "swordfish", "AWS_SECRET_ACCESS_KEY": "swordfish"})
    assert "swordfish" not in repr(said)


def test_where_profiles_are_written() -> None:
    home = Path("/users/me/.aws")
    assert aws_environment({"HOME": "/users/me"}).files == (home / "credentials", home / "config")
    moved = {"HOME": "/users/me", "AWS_SHARED_CREDENTIALS_FILE": "/a/b", "AWS_CONFIG_FILE": "/c"}
    assert aws_environment(moved).files == (Path("/a/b"), Path("/c"))
