import ipaddress

import pytest

from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy, normalise_host


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
def test_valid_hosts_are_accepted(entry: str, expected: str) -> None:
    assert normalise_host(entry) == expected


@pytest.mark.parametrize(
    "entry",
    [
        *("https://example.com", "example.com:443", "example.com/path", "[::1]", "fe80::1%eth0"),
        *("*", "a.*.example", "*example.com", "*.10.0.0.1", "*.", "a_b.example", "", ".", " ", "a..b", "exämple.com"),
        *("-a.example", "a-.example", f"{'a' * 64}.example"),
        *("10.0.0.1/8", "10.0.0.0/255.0.0.0", "10.0.0.0/33", "10.0.0.0/"),
    ],
)
def test_invalid_hosts_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="expected a host name"):
        normalise_host(entry)
    with pytest.raises(ValueError, match="expected a host name"):
        NetworkPolicy("allowlist", frozenset({entry}))


def test_policy_is_canonical() -> None:
    spelt = NetworkPolicy("allowlist", frozenset({" A.example. ", "a.EXAMPLE", "2001:db8:0::1"}))
    assert spelt == NetworkPolicy("allowlist", frozenset({"a.example", "2001:db8::1"}))


def test_contradictory_policies_are_rejected() -> None:
    with pytest.raises(ValueError, match="Expected one of public, no-network, allowlist as network mode, got 'none'"):
        NetworkPolicy("none")  # type: ignore[arg-type]
    for mode in ("public", "no-network"):
        with pytest.raises(ValueError, match=f'allowed_hosts needs .* got network_mode = "{mode}"'):
            NetworkPolicy(mode, frozenset({"a.example"}))  # type: ignore[arg-type]


def test_policies_are_merged() -> None:
    one, two = NetworkPolicy("allowlist", frozenset({"a"})), NetworkPolicy("allowlist", frozenset({"a", "b"}))
    assert (NO_NETWORK.with_hosts(["A"]), one.with_hosts(["b"]), PUBLIC.with_hosts(["b"])) == (one, two, PUBLIC)
    assert (NO_NETWORK.with_hosts([]), one.with_hosts([])) == (NO_NETWORK, one)


LIST = NetworkPolicy(
    "allowlist", frozenset({"example.com", "*.wild.example", "10.0.0.0/8", "192.0.2.7", "2001:db8::/32"})
)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("example.com", True),
        ("www.example.com", False),
        ("notexample.com", False),
        ("com", False),
        ("a.wild.example", True),
        ("a.b.wild.example", True),
        ("wild.example", False),
        ("notwild.example", False),
        ("10.0.0.1.example", False),
    ],
)
def test_allowed_names_match(name: str, allowed: bool) -> None:
    assert LIST.allows_name(name) is allowed
    assert PUBLIC.allows_name(name)
    assert not NO_NETWORK.allows_name(name)


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("10.255.0.1", True),
        ("11.0.0.1", False),
        ("192.0.2.7", True),
        ("192.0.2.8", False),
        ("2001:db8:ffff::1", True),
        ("2001:db9::1", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_allowed_addresses_match(address: str, allowed: bool) -> None:
    assert LIST.allows_address(ipaddress.ip_address(address)) is allowed
    assert PUBLIC.allows_address(ipaddress.ip_address(address))
    assert not NO_NETWORK.allows_address(ipaddress.ip_address(address))
