"""Numbers for people, and quantiles."""

from __future__ import annotations

import pytest

from kvbm.present.numbers import column_bytes, format_bytes, format_seconds, quantile


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.5 kB"),
        (402_000_000, "402 MB"),
        (402_400_000, "402 MB"),
        (999_600_000, "1 GB"),
        (1_500_000_000, "1.5 GB"),
        (4_000_000_000, "4 GB"),
        (12 * 10**12, "12 TB"),
        (5000 * 10**12, "5000 TB"),
    ],
)
def test_sizes_in_a_sentence(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0.0 kB"),
        (999, "1.0 kB"),
        (10**6, "1.0 MB"),
        (402_700_000, "402.7 MB"),
        (4 * 10**9, "4.0 GB"),
        (12 * 10**12, "12.0 TB"),
        (2500 * 10**15, "2,500.0 PB"),
    ],
)
def test_sizes_in_a_column(size_bytes: int, text: str) -> None:
    assert column_bytes(size_bytes) == text


def test_seconds() -> None:
    assert [format_seconds(seconds) for seconds in (0.0, 0.1234, 1.0, 1234.567)] == [
        "0.000",
        "0.123",
        "1.00",
        "1,234.57",
    ]


def test_quantiles_are_of_the_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [quantile(values, f) for f in (0.0, 0.2, 0.21, 0.5, 0.95, 1.0)] == [1, 1, 2, 3, 5, 5]
    assert quantile([7.0], 0.5) == 7.0
    assert quantile([], 0.5) == 0.0
