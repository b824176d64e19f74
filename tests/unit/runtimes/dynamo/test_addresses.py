"""The address that a process announces: found by itself, and refused where others cannot reach it."""

import msgspec
import pytest

from baton.config.engines import SglangOptions
from baton.config.runtime import RuntimeOptions
from baton.config.settings import Settings
from baton.errors import ConfigError
from baton.runtimes.dynamo.addresses import bind_address, is_loopback, source_address, with_addresses

REACHED_FROM = {
    "127.0.0.1": "127.0.0.1",
    "::1": "::1",
    "etcd.example": "10.0.0.5",
    "fd00::9": "fd00::5",
    "fe80::9": "fe80::5%eth0",
    "10.96.0.1": "10.1.2.3",
}


def source(host: str, port: int) -> str | None:
    return REACHED_FROM.get(host)


def etcd(addresses: str, bind: str = "") -> RuntimeOptions:
    return RuntimeOptions(discovery="etcd", etcd=addresses, bind=bind)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (RuntimeOptions(), "127.0.0.1"),
        (RuntimeOptions(bind="::1"), "::1"),
        (RuntimeOptions(bind="10.0.0.7"), "10.0.0.7"),
        (etcd("http://127.0.0.1:2379"), "127.0.0.1"),
        (etcd("http://[::1]:2379"), "::1"),
        (etcd("http://etcd.example:2379"), "10.0.0.5"),
        (etcd("https://etcd.example"), "10.0.0.5"),
        (etcd("http://[fd00::9]:2379"), "fd00::5"),
        (etcd("http://unreachable.example:2379, http://etcd.example:2379"), "10.0.0.5"),
        (etcd("http://etcd.example:2379", bind="10.0.0.7"), "10.0.0.7"),
        (etcd("http://127.0.0.1:2379", bind="127.0.0.1"), "127.0.0.1"),
    ],
)
def test_the_address_is_that_of_the_interface_that_reaches_discovery(options: RuntimeOptions, found: str) -> None:
    assert bind_address(options, source) == found


@pytest.mark.parametrize("host", ["10.96.0.1", "fd00::9"])
def test_in_kubernetes_it_is_the_address_that_reaches_the_api(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    assert bind_address(RuntimeOptions(discovery="kubernetes"), source) == REACHED_FROM[host]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (etcd("http://etcd.example:2379", bind="127.0.0.1"), "leave it out to use 10.0.0.5"),
        (etcd("http://[fd00::9]:2379", bind="::1"), "leave it out to use fd00::5"),
        (RuntimeOptions(discovery="kubernetes", bind="127.0.0.1"), "give one that they reach"),
        (RuntimeOptions(discovery="kubernetes"), "give one with --runtime-bind"),
        (etcd("http://unreachable.example:2379"), "give one with --runtime-bind"),
        (etcd("http://[fe80::9]:2379"), "give one with --runtime-bind"),
        (RuntimeOptions(bind="0.0.0.0"), "the address of one interface"),
        (RuntimeOptions(bind="::"), "the address of one interface"),
        (RuntimeOptions(bind="localhost"), "not an IP address"),
    ],
)
def test_an_address_that_others_cannot_reach_is_refused_with_what_to_set(
    options: RuntimeOptions, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="--runtime-bind") as refused:
        bind_address(options, source)
    assert advice in refused.value.message


def test_sglang_is_reached_at_the_same_address_unless_another_is_given() -> None:
    elsewhere = Settings(runtime=RuntimeOptions(bind="192.0.2.9"))
    assert with_addresses(elsewhere).sglang.host == "192.0.2.9"
    given = msgspec.structs.replace(elsewhere, sglang=SglangOptions(host="192.0.2.10"))
    assert with_addresses(given).sglang.host == "192.0.2.10"
    local = msgspec.structs.replace(elsewhere, sglang=SglangOptions(host="127.0.0.1"))
    with pytest.raises(ConfigError, match="--sglang-host"):
        with_addresses(local)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_loopback_is_reached_from_loopback(host: str) -> None:
    found = source_address(host, 9)
    assert found is not None
    assert is_loopback(found)


def test_a_name_that_nobody_has_is_not_reached() -> None:
    assert source_address("no-such-host.invalid", 9) is None
