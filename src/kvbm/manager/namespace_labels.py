"""Names of namespaces in metrics: the model and the beginning of the fingerprint, of which there are few."""

from __future__ import annotations

from kvbm.layout import Namespace
from kvbm.observe.metric_table import OTHER_NAMESPACES

LABELS_MAX = 16
"""A series stays as long as the manager lives; namespaces beyond so many share one name."""
_MODEL_CHARACTERS_MAX = 96
_DIGITS = 8


class NamespaceLabels:
    """Gives each namespace a name, which it has again when it comes back."""

    def __init__(self) -> None:
        self._known: dict[bytes, str] = {}

    def name(self, namespace: Namespace) -> str:
        """`MODEL/FINGERPRINT`, with its first 8 hex digits; `OTHER_NAMESPACES` once `LABELS_MAX` have names."""
        fingerprint = namespace.fingerprint
        if fingerprint not in self._known:
            if len(self._known) >= LABELS_MAX:
                return OTHER_NAMESPACES
            self._known[fingerprint] = (
                f"{namespace.model[-_MODEL_CHARACTERS_MAX:]}/{fingerprint.hex()[:_DIGITS]}"
            )
        return self._known[fingerprint]
