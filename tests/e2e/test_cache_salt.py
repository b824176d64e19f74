"""`cache_salt` separates tenants: a prompt that one has cached is never served from the cache to another."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

pytest.importorskip("torch")

from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.harness import Serve, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "tiny"
PROMPT = "what one tenant asks is not for the other to know; " * 8
CACHED = len(PROMPT) // 16 * 16
LAYOUTS = {"aggregated": {"workers": 2}, "disaggregated": {"prefill": 2, "decode": 1}}
# The echo engine has no KV to hand off.
KV = [("echo", "aggregated", "kv"), ("torch", "aggregated", "kv"), ("torch", "disaggregated", "kv")]
IN_TURN = [(engine, layout, "round-robin") for engine, layout, _ in KV]


def systems(*chosen: tuple[str, str, str]) -> list[ParameterSet]:
    """Return systems as parameters: those of the built-in engine that route in turn take long for what they find."""
    return [
        pytest.param(each, id=" ".join(each), marks=pytest.mark.slow if each in IN_TURN[1:] else ()) for each in chosen
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module", params=systems(*KV, *IN_TURN))
def served(start_shared: Callable[..., Serve], model: Path, request: pytest.FixtureRequest) -> Iterator[Serve]:
    engine, layout, router = request.param
    flags = ("--model", str(model), "--name", MODEL, "--router", router)
    serve = start_shared(Serve, *flags, engine=engine, **LAYOUTS[layout])
    yield serve
    serve.stop()


def cached(serve: Serve, ending: str, salt: str | None = None) -> int:
    extra = None if salt is None else {"cache_salt": salt}
    answer = serve.client(strict=False).completions.create(
        model=MODEL, prompt=PROMPT + ending, max_tokens=2, extra_body=extra
    )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details is not None else 0


def test_tenants_share_no_cached_prompt(served: Serve) -> None:
    for tenant in ("alice", "bob", None):
        assert cached(served, "a", tenant) == 0, f"{tenant} is served what another tenant has cached"
        eventually(lambda tenant=tenant: cached(served, "b", tenant) >= CACHED, what=f"{tenant} has a cache")


@pytest.mark.parametrize("served", systems(*KV), indirect=True)
def test_salted_prompts_go_where_they_are_cached(served: Serve) -> None:
    for tenant in ("carol", "dave"):
        assert any(goes_where_it_is_cached(served, f"{tenant}-{number}") for number in range(4)), tenant


def goes_where_it_is_cached(serve: Serve, tenant: str) -> bool:
    """Whether six prompts in a row find the cache of their tenant, in one of two workers.

    The first may find it by chance, before the router has heard of it: then the next can miss it.
    """
    eventually(lambda: cached(serve, "a", tenant) >= CACHED, what=f"{tenant} has a cache")
    return all(cached(serve, ending, tenant) >= CACHED for ending in "bcdefg")
