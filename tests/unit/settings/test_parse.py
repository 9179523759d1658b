"""Text to values: what is accepted is accepted exactly, and everything else is one line."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.errors import SettingsError
from kvbm.settings.parse import (
    BYTES_MAX,
    FALSE_WORDS,
    GB,
    TRUE_WORDS,
    UNITS,
    parse_bool,
    parse_choice,
    parse_count,
    parse_endpoint,
    parse_gb,
    parse_log_filter,
    parse_part,
    parse_path,
    parse_size,
    parse_socket_path,
    parse_text,
)

BLANKS = st.text(" \t", max_size=3)


def message(parse, *arguments) -> str:
    with pytest.raises(SettingsError) as caught:
        parse("DYN_KVBM_X", *arguments)
    text = str(caught.value)
    assert text.startswith("DYN_KVBM_X=")
    assert "\n" not in text
    # 64 characters of a value at most, each of which may be written as an escape.
    assert len(text) < 900
    return text


@given(st.sampled_from(TRUE_WORDS + FALSE_WORDS), BLANKS, BLANKS, st.data())
def test_truth_rule_ignores_case_and_blanks(word, before, after, data):
    mixed = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in word)
    assert parse_bool("DYN_KVBM_X", before + mixed + after) is (word in TRUE_WORDS)


@given(st.text())
def test_no_other_word_is_a_truth_value(text):
    if text.strip().lower() in TRUE_WORDS + FALSE_WORDS:
        return
    said = message(parse_bool, text)
    assert "1 true on yes" in said
    assert "0 false off no" in said


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4", 4 * GB),
        ("0.001", 1_000_000),
        (" 0.5 ", 500_000_000),
        ("+2", 2 * GB),
        (".5", 500_000_000),
        ("1e2", 100 * GB),
        ("0", 0),
        ("0.1", 100_000_000),
        ("1.000000001", GB + 1),
    ],
)
def test_gb(text, size_bytes):
    assert parse_gb("DYN_KVBM_X", text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "nan",
        "inf",
        "-inf",
        "-1",
        "-0.5",
        "4GB",
        "abc",
        "1_000",
        "0x10",
        "1,5",
        "٤",
        "1e",
        ".",
        "1 2",
        "1e9999",
    ],
)
def test_gb_refuses(text):
    assert repr(text) in message(parse_gb, text)


def test_gb_refuses_what_rounds_to_nothing():
    assert "less than one byte" in message(parse_gb, "1e-12")


@pytest.mark.parametrize("text", ["1e999", "9" * 60, "9223372037"])
def test_gb_is_bounded_without_building_the_number(text):
    assert str(BYTES_MAX) in message(parse_gb, text)


@given(st.integers(0, 2**40), st.integers(0, 999), st.sampled_from(sorted(UNITS)), BLANKS, st.booleans())
def test_size_is_exact(whole, thousandths, unit, between, upper):
    text = f"{whole}.{thousandths:03d}{between}{unit.upper() if upper else unit}"
    exact = (Fraction(whole) + Fraction(thousandths, 1000)) * UNITS[unit]
    if exact > BYTES_MAX or (UNITS[unit] == 1 and thousandths):
        message(parse_size, text)
    else:
        assert parse_size("DYN_KVBM_X", text) == int(exact)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4GB", 4 * 10**9),
        ("512MB", 512 * 10**6),
        ("1GiB", 2**30),
        ("4096", 4096),
        ("1.5 kib", 1536),
        ("0", 0),
    ],
)
def test_size(text, size_bytes):
    assert parse_size("--disk", text) == size_bytes


@pytest.mark.parametrize(
    "text", ["4G", "", "GB", "-4GB", "nan", "infGB", "4 GB 2", "1e3", "4ＧB", "0.5", "4\nGB\n5"]
)
def test_size_refuses(text):
    message(parse_size, text)


@given(st.text(max_size=200))
def test_any_text_is_a_size_or_one_line(text):
    for parse in (parse_size, parse_gb):
        try:
            size_bytes = parse("DYN_KVBM_X", text)
        except SettingsError:
            message(parse, text)
        else:
            assert 0 <= size_bytes <= BYTES_MAX


@given(st.integers(-(10**25), 10**25), st.integers(0, 100), st.integers(100, 10**6))
def test_count_holds_its_bounds(number, minimum, maximum):
    if minimum <= number <= maximum:
        assert parse_count("DYN_KVBM_X", f" {number} ", minimum, maximum) == number
    else:
        assert f"from {minimum} to {maximum}" in message(parse_count, str(number), minimum, maximum)


@pytest.mark.parametrize("text", ["1.0", "1e3", "nan", "", "ten", "²", "٣", "9" * 5000])
def test_count_refuses(text):
    message(parse_count, text, 0, 10**9)


def test_choice():
    assert parse_choice("DYN_KVBM_X", " Open-Direct ", ("default", "open-direct")) == "open-direct"
    assert "default open-direct" in message(parse_choice, "other", ("default", "open-direct"))


@pytest.mark.parametrize("text", ["", "  ", "a\nb", "a\0"])
def test_text_refuses(text):
    message(parse_text, text)


def test_paths():
    assert parse_path("DYN_KVBM_X", "/mnt/with blank/") == "/mnt/with blank/"
    message(parse_path, "a\0b")
    assert parse_socket_path("DYN_KVBM_X", "/" + "a" * 106) == "/" + "a" * 106
    assert "107 bytes" in message(parse_socket_path, "/" + "a" * 107)
    # Bytes count, not characters.
    message(parse_socket_path, "/" + "é" * 54)


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("debug", "debug"),
        ("WARNING", "warn"),
        ("info,kvbm=debug", "debug"),
        ("kvbm=trace,error", "trace"),
        ("warn,tower_http[span]=debug,hyper=off", "warn"),
        ("hyper=debug", "info"),
        (" error , ", "error"),
    ],
)
def test_log_filter(text, level):
    assert parse_log_filter("DYN_LOG", text) == level


@pytest.mark.parametrize("text", ["loud", "info,kvbm=loud", "5"])
def test_log_filter_refuses(text):
    with pytest.raises(SettingsError, match="trace debug info warn error off"):
        parse_log_filter("DYN_LOG", text)


@pytest.mark.parametrize(
    "text", ["tcp://*:5557", "tcp://127.0.0.1:0", "tcp://[::1]:65535", "tcp://node-3.local:1", "ipc:///run/e"]
)
def test_addresses_of_zmq_are_taken_as_they_are(text):
    assert parse_endpoint("events_endpoint", f" {text} ") == text


@pytest.mark.parametrize(
    "text",
    [
        "5557",
        "tcp://",
        "tcp://*",
        "tcp://*:65536",
        "tcp://*:x",
        "tcp://a*b:80",
        "tcp://*1:80",
        "ipc://",
        "inproc://e",
        "udp://*:1",
        "",
    ],
)
def test_what_is_no_address_of_zmq_is_refused(text):
    with pytest.raises(SettingsError, match="events_endpoint="):
        parse_endpoint("events_endpoint", text)


@given(part=st.decimals(0, 1, places=6, allow_nan=False), before=BLANKS, after=BLANKS)
def test_parts(part, before: str, after: str) -> None:
    assert parse_part("DYN_KVBM_X", f"{before}{part:f}{after}") == float(part)


@pytest.mark.parametrize("text", ["", "1.01", "-0.1", "half", "50%", "nan", "inf", "1e400", "0,5", "0x1"])
def test_what_is_no_part(text: str) -> None:
    assert "a number from 0 to 1" in message(parse_part, text)
