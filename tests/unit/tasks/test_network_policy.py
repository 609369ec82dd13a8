from __future__ import annotations

import pytest

from ares_exp.tasks.network_policy import normalise_host


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("Example.COM", "example.com"),
        ("  example.com.. ", "example.com"),
        ("localhost", "localhost"),
        ("*.example.com", "*.example.com"),
        ("a-b.example", "a-b.example"),
        (f"{'a' * 63}.example", f"{'a' * 63}.example"),
        ("10.0.0.1", "10.0.0.1"),
        ("2001:DB8:0:0::1", "2001:db8::1"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("2001:db8:0::/32", "2001:db8::/32"),
    ],
)
def test_accepted_hosts(entry: str, expected: str) -> None:
    assert normalise_host(entry) == expected


@pytest.mark.parametrize(
    "entry",
    [
        "https://example.com",
        "example.com:443",
        "example.com/path",
        "[::1]",
        "fe80::1%eth0",
        "*",
        "a.*.example",
        "*example.com",
        "*.10.0.0.1",
        "*.",
        "a_b.example",
        "",
        ".",
        " ",
        "-a.example",
        "a-.example",
        f"{'a' * 64}.example",
        "10.0.0.1/8",
        "10.0.0.0/255.0.0.0",
        "10.0.0.0/33",
        "10.0.0.0/",
        "exämple.com",
        "a..b",
    ],
)
def test_refused_hosts(entry: str) -> None:
    with pytest.raises(ValueError, match="expected a host name"):
        normalise_host(entry)
