"""Which variables the runtime gets for TLS, and what is said about planes that stay in plain text."""

from pathlib import Path

import pytest

from baton.config.peer_tls import plain_text_planes
from baton.config.runtime import RuntimeOptions
from baton.errors import ConfigError
from baton.runtimes.dynamo.environment import environment
from tests.certificates import Authority

CERTIFICATES = pytest.mark.process  # openssl makes them


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("certificates")
    issued = Authority(directory).issue(directory, "baton")
    return {f"tls_{name}": str(path) for name, path in issued._asdict().items()}


@CERTIFICATES
def test_the_request_plane_verifies_both_ends(files: dict[str, str]) -> None:
    values = environment(RuntimeOptions(**files))
    for name in ("DYN_TCP_TLS_CERT_PATH", "DYN_TCP_TLS_CLIENT_CERT_PATH"):
        assert values[name] == files["tls_certificate"]
    for name in ("DYN_TCP_TLS_CA_CERT_PATH", "DYN_TCP_TLS_CLIENT_CA_CERT_PATH"):
        assert values[name] == files["tls_ca"]
    assert values["DYN_TCP_TLS_SERVER_NAME"] == "baton"


def test_without_files_nothing_is_said_about_tls() -> None:
    assert not [name for name in environment(RuntimeOptions()) if "TLS" in name or "AUTH" in name]


@CERTIFICATES
def test_etcd_and_nats_get_certificates_where_their_addresses_ask_for_them(files: dict[str, str]) -> None:
    options = {"discovery": "etcd", "events": "nats", "bind": "127.0.0.1"}
    plain = environment(RuntimeOptions(**files, **options))
    assert not {"ETCD_AUTH_CA", "NATS_TLS_CA_CERT_PATH"} & set(plain)
    values = environment(RuntimeOptions(**files, **options, etcd="https://127.0.0.1:2379", nats="tls://127.0.0.1:4222"))
    assert values["ETCD_AUTH_CA"] == Path(files["tls_ca"]).read_text()  # the runtime takes the content
    assert values["NATS_TLS_CLIENT_KEY_PATH"] == files["tls_key"]


@CERTIFICATES
def test_an_inherited_variable_does_not_switch_verification_off(files: dict[str, str]) -> None:
    values = environment(RuntimeOptions(**files, nats="tls://127.0.0.1:4222"))
    assert values["DYN_TCP_TLS_INSECURE"] == values["NATS_TLS_INSECURE"] == "false"


@CERTIFICATES
def test_files_that_cannot_be_used_are_refused_at_the_start(files: dict[str, str], tmp_path: Path) -> None:
    """A frontend has no KV port, and the runtime reads the files at its first connection."""
    (tmp_path / "key").write_text("no PEM")
    for key in (tmp_path / "key", tmp_path / "absent"):
        with pytest.raises(ConfigError, match="--runtime-tls-key"):
            environment(RuntimeOptions(**{**files, "tls_key": str(key)}))


@CERTIFICATES
def test_one_member_of_etcd_in_plain_text_is_named(files: dict[str, str]) -> None:
    options = RuntimeOptions(
        **files, discovery="etcd", events="nats", nats="tls://n:1", bind="127.0.0.1", etcd="https://a:1, http://b:1"
    )
    (plane,) = plain_text_planes(options)
    assert "--runtime-etcd" in plane
    assert "ETCD_AUTH_CA" in environment(options)


@CERTIFICATES
def test_a_certificate_without_an_authority_is_refused(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--runtime-tls-ca"):
        environment(RuntimeOptions(**{**files, "tls_ca": ""}))


@CERTIFICATES
def test_planes_in_plain_text_are_named(files: dict[str, str]) -> None:
    assert plain_text_planes(RuntimeOptions(discovery="etcd")) == []  # no TLS: nothing is expected
    assert plain_text_planes(RuntimeOptions(**files)) == []  # nothing leaves the host
    discovery, events = plain_text_planes(RuntimeOptions(**files, discovery="etcd"))
    assert "--runtime-etcd" in discovery
    assert "--runtime-events nats" in events
    (broker,) = plain_text_planes(RuntimeOptions(**files, discovery="etcd", events="nats", etcd="https://etcd:2379"))
    assert "--runtime-nats" in broker
    encrypted = RuntimeOptions(**files, discovery="etcd", events="nats", etcd="https://e:1,", nats="tls://n:1")
    assert plain_text_planes(encrypted) == []
