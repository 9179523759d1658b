"""The public surface changes only on purpose: the snapshot beside this file says what it is."""

from __future__ import annotations

from rigs.public_surface import REWRITE, SNAPSHOT, describe, list_differences


def test_the_public_surface_is_that_of_the_snapshot() -> None:
    lines = list_differences(SNAPSHOT.read_text(), describe())
    assert not lines, (
        f"the public surface differs from {SNAPSHOT.name}; if it is meant, give CHANGELOG.md a line and run "
        f"`{REWRITE}`:\n" + "\n".join(lines)
    )


def test_a_difference_is_named_by_its_line() -> None:
    written = "metric a gauge\nmetric b gauge\nsetting c\n"
    assert list_differences(written, "metric a gauge\nmetric b counter\nsetting c\nsetting d\n") == [
        "-metric b gauge",
        "+metric b counter",
        "+setting d",
    ]
    assert list_differences(written, written) == []
