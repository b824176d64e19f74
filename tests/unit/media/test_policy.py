"""Which URLs and addresses a worker asks for, without asking."""

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
def test_public_hosts_are_asked(url: str) -> None:
    ANY.check_url(URL(url))
    SOME.check_url(URL(url))


@pytest.mark.parametrize(
    ("url", "why"),
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
def test_others_are_not_and_the_reason_is_told(url: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        ANY.check_url(URL(url))


@pytest.mark.parametrize("host", ["example.org", "notexample.com", "example.com.evil.org", "8.8.8.8"])
def test_with_domains_given_no_other_host_is_asked(host: str) -> None:
    with pytest.raises(Refused, match="not among"):
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
def test_addresses_that_only_some_can_reach_are_not_connected_to(address: str) -> None:
    with pytest.raises(Refused, match="not public"):
        Policy(MediaOptions(private="10.1.0.0/16")).check_address(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "10.1.2.3", "fd12::1", "::ffff:10.1.0.1"])
def test_public_addresses_and_those_that_are_allowed_are_connected_to(address: str) -> None:
    SOME.check_address(address)


@given(st.ip_addresses(v=4))
def test_an_address_is_refused_in_every_disguise_or_in_none(address: object) -> None:
    def refused(text: str) -> bool:
        try:
            ANY.check_address(text)
        except Refused:
            return True
        return False

    assert refused(str(address)) == refused(f"::ffff:{address}") == refused(f"64:ff9b::{address}")


def test_a_network_that_is_none_is_a_mistake_of_whoever_started_it() -> None:
    with pytest.raises(ConfigError, match="--media-private"):
        Policy(MediaOptions(private="10.1.0.0/99"))


def test_the_policy_is_a_section_of_the_settings() -> None:
    settings = load({"media.domains": "example.com"}, {"BATON_MEDIA_MAX_ITEMS": "3"}, None)
    assert settings.media.domains == "example.com"
    assert settings.media.max_items == 3
    assert load({}, {}, None).media == MediaOptions()
