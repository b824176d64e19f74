"""Which URLs and addresses a worker may fetch from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from baton.config.load import load
from baton.config.media import MediaOptions
from baton.errors import ConfigError
from baton.media.policy import Policy, Refused

ANY = Policy(MediaOptions())
SOME = Policy(MediaOptions(domains="example.com, images.example.org.", private="10.1.0.0/16,fd00::/8"))


@pytest.mark.parametrize(
    "url",
    ["http://example.com/a.png", "https://a.b.example.com:8443/x?y=z", "HTTPS://EXAMPLE.COM/", "https://example.com./"],
)
def test_public_hosts_are_allowed(url: str) -> None:
    ANY.check_url(URL(url))
    SOME.check_url(URL(url))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "only http"),
        ("ftp://example.com/a", "only http"),
        ("gopher://example.com/", "only http"),
        ("/a.png", "only http"),
        ("http:///a.png", "no host"),
        ("http://user:secret@example.com/", "password"),
        ("http://127.0.0.1/", "not public"),
        ("http://[::1]/", "not public"),
        ("http://[::ffff:127.0.0.1]/", "not public"),
        ("http://169.254.169.254/latest/meta-data", "not public"),
        ("http://0.0.0.0/", "not public"),
        ("http://2130706433/", "not an address"),
        ("http://127.1/", "not an address"),
    ],
)
def test_other_urls_are_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        ANY.check_url(URL(url))


@pytest.mark.parametrize("host", ["example.org", "notexample.com", "example.com.evil.org", "8.8.8.8"])
def test_hosts_outside_the_configured_domains_are_refused(host: str) -> None:
    with pytest.raises(Refused, match="not an allowed"):
        SOME.check_url(URL(f"https://{host}/"))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.2.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "64:ff9b::10.0.0.1",
        "2002:7f00:1::",
    ],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(Refused, match="not public"):
        Policy(MediaOptions(private="10.1.0.0/16")).check_address(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "10.1.2.3", "fd12::1", "::ffff:10.1.0.1"])
def test_public_and_configured_addresses_are_allowed(address: str) -> None:
    SOME.check_address(address)


@given(st.ip_addresses(v=4))
def test_address_is_refused_in_every_notation_or_in_none(address: object) -> None:
    def refused(text: str) -> bool:
        try:
            ANY.check_address(text)
        except Refused:
            return True
        return False

    assert refused(str(address)) == refused(f"::ffff:{address}") == refused(f"64:ff9b::{address}")


def test_invalid_network_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="--media-private"):
        Policy(MediaOptions(private="10.1.0.0/99"))


def test_policy_is_a_section_of_the_settings() -> None:
    settings = load({"media.domains": "example.com"}, {"BATON_MEDIA_MAX_ITEMS": "3"}, None)
    assert settings.media.domains == "example.com"
    assert settings.media.max_items == 3
    assert load({}, {}, None).media == MediaOptions()
