"""What a store is opened with that nobody else shall see."""

from __future__ import annotations


class Credentials:
    """A user's name (or an access key's) and a secret; empty where the store finds its own. Never printed."""

    __slots__ = ("secret", "user")

    def __init__(self, user: str = "", secret: str = "") -> None:
        self.user = user
        self.secret = secret

    def __repr__(self) -> str:
        return "Credentials(***)"


NOBODY = Credentials()
