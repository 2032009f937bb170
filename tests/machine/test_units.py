import math

import numpy as np
import pytest

from labsupport.units import format_bytes, format_rate, format_seconds, format_value, parse_bytes


@pytest.mark.parametrize(
    "text, size",
    [
        (185, 185),
        (0, 0),
        (np.int64(7), 7),
        ("185", 185),
        ("185 B", 185),
        ("512MiB", 512 * 1024**2),
        ("512 mib", 512 * 1024**2),
        (" 1.5GiB ", 1610612736),
        ("2KiB", 2048),
        ("1TiB", 1024**4),
        ("0.3KB", 300),
        ("80GB", 80 * 10**9),
        ("2 TB", 2 * 10**12),
        ("16MB", 16_000_000),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size
    assert type(parse_bytes(text)) is int


@pytest.mark.parametrize("wrong", ["", "MiB", "512M", "512Mi", "-1MiB", "1..5GiB", "1e3", "many", -1, 1.5, True, None])
def test_a_wrong_size_is_refused_with_what_to_write(wrong):
    with pytest.raises(ValueError, match="MiB.*1024.*MB.*1000"):
        parse_bytes(wrong)


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 B"),
        (185, "185 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (12_897_484, "12.3 MiB"),
        (1024**2 - 1, "1.00 MiB"),
        (512 * 1024**2, "512 MiB"),
        (-2048, "-2.00 KiB"),
        (5000 * 1024**4, "5000 TiB"),
        (0.5, "0.500 B"),
        (math.inf, "inf B"),
    ],
)
def test_format_bytes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 s"),
        (3.2e-10, "0.320 ns"),
        (4e-9, "4.00 ns"),
        (1.234e-5, "12.3 µs"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (59.99, "1.00 min"),
        (90, "1.50 min"),
        (7200, "2.00 h"),
        (-0.002, "-2.00 ms"),
        (math.nan, "nan s"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (1.58e11, "FLOP/s", "158 GFLOP/s"),
        (7.945e14, "FLOP/s", "794 TFLOP/s"),
        (2.31e10, "B/s", "23.1 GB/s"),
        (999.9e6, "B/s", "1.00 GB/s"),
        (12.0, "B/s", "12.0 B/s"),
        (math.inf, "B/s", "inf B/s"),
    ],
)
def test_format_rate(value, unit, text):
    assert format_rate(value, unit) == text


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (12_897_484, "B", "12.3 MiB"),
        (0.0123, "s", "12.3 ms"),
        (6_442_450_944, "FLOP", "6.44 GFLOP"),
        (1.58e11, "FLOP/s", "158 GFLOP/s"),
        (2.31e10, "B/s", "23.1 GB/s"),
        (5.312, "x", "5.31x"),
        (2, "x", "2x"),
        (0.86, "%", "86 %"),
        (0.9641, "share", "96.4 %"),
        (1.0, "share", "100 %"),
        (185, "samples", "185 samples"),
        (np.int64(185), "samples", "185 samples"),
        (123456789, "samples", "123456789 samples"),
        (185.0, "samples", "185 samples"),
        (4412.3, "samples/s", "4410 samples/s"),
        (1.5, "cores", "1.50 cores"),
        (0.00012345, "", "0.000123"),
        (9.999, "", "10.0"),
        (np.float32(2.5), "", "2.50"),
        (0, "", "0"),
        (math.nan, "", "nan"),
    ],
)
def test_format_value(value, unit, text):
    assert format_value(value, unit) == text
