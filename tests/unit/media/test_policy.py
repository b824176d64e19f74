"""Which URLs and addresses a worker may fetch from."""

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from baton.config.load import load
from baton.config.media import MediaOptions
from baton.errors import ConfigError
from baton.media.addresses import METADATA
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
        "2002:808:808::",
        "2001:0:808:808::1",
        "2001:db8::1",
        "3fff::1",
        "2606:4700::5efe:8.8.8.8",
        "2606:4700::200:5efe:10.0.0.1",
        "64:ff9b:1::8.8.8.8",
        "fec0::1",
        "::8.8.8.8",
        "::ffff:0:8.8.8.8",
        "100::1",
        "5f00::1",
        "192.0.0.192",
        "192.88.99.1",
        "168.63.129.16",
        "::ffff:168.63.129.16",
        "64:ff9b::a9fe:a9fe",
        "169.254.169.254",
        "fd00:ec2::254",
    ],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(Refused, match="not public"):
        Policy(MediaOptions(private="10.1.0.0/16")).check_address(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "10.1.2.3", "fd12::1", "::ffff:10.1.0.1"])
def test_public_and_configured_addresses_are_allowed(address: str) -> None:
    SOME.check_address(address)


@pytest.mark.parametrize("address", [str(address) for address in METADATA])
def test_metadata_services_are_allowed_one_by_one_only(address: str) -> None:
    everything = "0.0.0.0/0,::/0"
    with pytest.raises(Refused, match="not public"):
        Policy(MediaOptions(private=everything)).check_address(address)
    Policy(MediaOptions(private=f"{everything},{address}")).check_address(address)


@given(st.ip_addresses())
def test_no_address_is_allowed_that_python_calls_local(address: IPv4Address | IPv6Address) -> None:
    if not address.is_global:
        with pytest.raises(Refused):
            ANY.check_address(str(address))


@pytest.mark.parametrize("url", ["http://127.0.0.1./", "http://0x7f.1/", "http://1.2.3.0x4/", "http://017700000001/"])
def test_numbers_in_other_notations_are_no_names(url: str) -> None:
    with pytest.raises(Refused, match=r"not an address|not public"):
        ANY.check_url(URL(url))


def test_domains_are_compared_in_ascii() -> None:
    policy = Policy(MediaOptions(domains="Bücher.example"))
    policy.check_url(URL("https://www.bücher.example/a.png"))
    policy.check_url(URL("https://xn--bcher-kva.example/a.png"))
    with pytest.raises(ConfigError, match="--media-domains"):
        Policy(MediaOptions(domains="a b"))


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
