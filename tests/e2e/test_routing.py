"""How a frontend selects workers: by what a request names, by its session, and by what workers register."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.harness import Cluster, Process, Serve, System

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

WORKERS = 2
UNKNOWN = 7
LONG = 500_000  # tokens of an answer that nobody reads to its end

POLICY = """
default_policy_family: interactive
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: interactive, policy_family: interactive, cache_bucket: all, quantum: 4}
  - {name: batch, quantum: 1}
"""


class Tainted(Cluster):
    """Workers that have a taint each, and one that all of them have."""

    def start_worker(self, number: int, *more: str) -> Process:
        return super().start_worker(number, "--taints", f"rank-{number}, echo", *more)


@pytest.fixture(scope="module")
def tainted(start_shared: Callable[..., Tainted], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tainted]:
    policy = tmp_path_factory.mktemp("policy") / "policy.yaml"
    policy.write_text(POLICY)
    settings = {"BATON_ROUTER": "kv", "BATON_ROUTER_POLICY": str(policy)}
    cluster = start_shared(Tainted, workers=WORKERS, settings=settings)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def direct(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    serve = start_shared(Serve, "--router", "direct", workers=WORKERS)
    yield serve
    serve.stop()


@pytest.fixture(scope="module", params=[("least-loaded", "hard"), ("power-of-two", "soft")], ids=" ".join)
def affine(start_shared: Callable[..., Serve], request: pytest.FixtureRequest) -> Iterator[Serve]:
    router, affinity = request.param
    serve = start_shared(Serve, "--router", router, "--session-affinity", affinity, workers=WORKERS)
    yield serve
    serve.stop()


def instances(system: System) -> list[int]:
    """Return the ids of the workers."""
    listed = json.loads(system.get("/health")[1])["instances"]
    return sorted(each["instance_id"] for each in listed if each["endpoint"] == "generate")


def worker_of(system: System, headers: dict[str, str] | None = None, **nvext: Any) -> int:
    """Return the id of the worker that serves a request."""
    answer = system.client(strict=False).completions.create(
        model="echo",
        prompt="where am I?",
        max_tokens=2,
        extra_headers=headers,
        extra_body={"nvext": {"extra_fields": ["worker_id"], **nvext}},
    )
    extensions: Any = answer.model_extra
    return int(extensions["nvext"]["worker_id"]["decode_worker_id"])


def test_a_request_goes_to_the_worker_that_it_names(direct: Serve) -> None:
    for instance in instances(direct) * 2:
        assert worker_of(direct, {"x-dynamo-worker-instance-id": str(instance)}) == instance
        assert worker_of(direct, backend_instance_id=instance) == instance


@pytest.mark.parametrize("headers", [{}, {"x-dynamo-worker-instance-id": str(UNKNOWN)}], ids=["none", "unknown"])
def test_direct_routing_refuses_a_request_without_a_worker(direct: Serve, headers: dict[str, str]) -> None:
    with pytest.raises(openai.BadRequestError):
        worker_of(direct, headers)


def test_a_session_stays_on_its_worker_and_others_go_to_a_less_busy_one(affine: Serve) -> None:
    session = {"x-dynamo-session-id": "a conversation"}
    bound = worker_of(affine, session)
    (other,) = set(instances(affine)) - {bound}
    with affine.client(strict=False).completions.create(
        model="echo", prompt="a long answer", max_tokens=LONG, stream=True, extra_headers=session
    ) as answer:
        next(iter(answer))
        assert [worker_of(affine) for _ in range(4)] == [other] * 4
        assert [worker_of(affine, session) for _ in range(4)] == [bound] * 4


def test_a_request_goes_to_a_worker_with_the_taints_that_it_requires(tainted: Tainted) -> None:
    workers = [
        {worker_of(tainted, routing_constraints={"required_taints": [taint, "echo"]}) for _ in range(4)}
        for taint in ("rank-0", "rank-1")
    ]
    assert sorted(worker for found in workers for worker in found) == instances(tainted), "one worker for each taint"


def test_a_required_taint_is_not_ignored_by_routers_that_know_none(affine: Serve) -> None:
    with pytest.raises(openai.BadRequestError, match="required_taints: this worker has no taint rank-0"):
        worker_of(affine, routing_constraints={"required_taints": ["rank-0"]})


def test_a_request_waits_in_the_queue_of_the_class_that_it_names(tainted: Tainted) -> None:
    for name, requests in (("batch", 3), ("unheard-of", 2)):
        for _ in range(requests):
            worker_of(tainted, {"x-dynamo-meta-policy-class": name})
    _, text = tainted.get("/metrics")
    received = "dynamo_frontend_router_admission_received_total"
    assert f'{received}{{model="echo",policy_class="batch",worker_type="decode"}} 3' in text
    assert f'{received}{{model="echo",policy_class="interactive",' in text
    assert "unheard-of" not in text


@pytest.mark.parametrize("content", [None, "nonsense: 1"], ids=["missing", "invalid"])
def test_a_policy_that_the_router_does_not_accept_ends_the_start(tmp_path: Path, content: str | None) -> None:
    policy = tmp_path / "policy.yaml"
    if content is not None:
        policy.write_text(content)
    process = Process(["frontend", "--router", "kv", "--router-policy", str(policy)], tmp_path / "frontend.log")
    assert process.wait() == 2
    assert f"--router-policy: failed to {'read' if content is None else 'parse'}" in process.output.read_text()
