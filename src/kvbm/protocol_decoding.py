"""Messages as they were sent: typed, or an error in one line."""

from __future__ import annotations

from typing import cast

import msgspec

from kvbm.errors import ProtocolError
from kvbm.protocol import FromManager, ToManager

_to_manager = msgspec.msgpack.Decoder(ToManager)
_from_manager = msgspec.msgpack.Decoder(FromManager)
MALFORMED = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)


def decode_to_manager(body: bytes) -> ToManager:
    """A typed message from a client, or ProtocolError in one line."""
    return cast(ToManager, _decoded(_to_manager, body))


def decode_from_manager(body: bytes) -> FromManager:
    """A typed message from the manager, or ProtocolError in one line."""
    return cast(FromManager, _decoded(_from_manager, body))


def _decoded(decoder: msgspec.msgpack.Decoder, body: bytes) -> object:  # type: ignore[type-arg]  # either's
    try:
        return decoder.decode(body)
    except MALFORMED as error:
        raise ProtocolError(f"malformed message of {len(body)} bytes: {error}") from None
