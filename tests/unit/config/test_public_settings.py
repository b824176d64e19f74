"""Settings as operators see them: only what differs, and no secret."""

from baton.config.public_settings import HIDDEN, public_settings
from baton.config.runtime import RuntimeOptions
from baton.config.settings import Settings


def test_defaults_are_left_out() -> None:
    assert public_settings(Settings()) == {}
    assert public_settings(Settings(max_in_flight=7)) == {"max_in_flight": 7}


def test_secrets_are_hidden() -> None:
    shown = public_settings(
        Settings(
            api_key="sk-1",
            control_token="t0p",
            control_token_file="/run/token",
            engine_args=("--hf-token", "hf_1", "--api-key=k", "--tp", "2"),
            runtime=RuntimeOptions(etcd="http://user:pw@etcd:2379,http://other:2379"),
        )
    )
    assert shown["api_key"] == shown["control_token"] == HIDDEN
    assert shown["control_token_file"] == "/run/token"
    assert shown["engine_args"] == ["--hf-token", HIDDEN, f"--api-key={HIDDEN}", "--tp", "2"]
    assert shown["runtime.etcd"] == "http://etcd:2379,http://other:2379"
