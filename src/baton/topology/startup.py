"""The end of the start of `baton serve`: the wait for the model, and a first request to it."""

import asyncio
import json
import logging
from collections.abc import Sequence

from baton.config.settings import Settings
from baton.engines.registry import embeds
from baton.errors import ConfigError, EngineDead
from baton.runtimes.dynamo.inotify import REMEDY, out_of_instances
from baton.topology.own_endpoint import Answer, OwnEndpoint

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05
POLL_TIMEOUT_S = 2.0
DISCOVERY_S = 5.0
RETRY_S = 30.0
REFUSALS = (400, 401, 403, 405, 413, 422)
"""Statuses that the same request gets again."""
FIRST_REQUEST_ID = "baton-first-request"


async def wait_for_models(endpoint: OwnEndpoint, names: Sequence[str]) -> None:
    """Wait until `/v1/models` lists all `names`. The caller sets the timeout.

    A frontend that has no inotify instance does not find any model, and does not say so. Raises ConfigError then.
    """
    logged = ""
    clock = asyncio.get_running_loop().time
    deadline = clock() + DISCOVERY_S
    while True:
        if clock() > deadline and out_of_instances():
            raise ConfigError(f"the frontend does not find the model: {REMEDY}")
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                missing = set(names) - set(await _list_models(endpoint))
            if not missing:
                return
            problem = f"not registered: {', '.join(sorted(missing))}"
        except (OSError, TimeoutError) as error:
            problem = repr(error)
        if problem != logged:
            log.debug("waiting for %s: %s", endpoint, problem)
            logged = problem
        await asyncio.sleep(POLL_INTERVAL_S)


async def send_first_request(endpoint: OwnEndpoint, settings: Settings, retry_s: float = RETRY_S) -> None:
    """Send the smallest request to the model, through frontend and workers, until one is answered.

    A frontend may refuse requests for a moment after it has listed a model. Raises EngineDead with the answer to the
    last request, after `retry_s`, or at once if another try cannot help. The caller limits the time of one request.
    """
    path, body = _smallest_request(settings)
    clock = asyncio.get_running_loop().time
    deadline = clock() + retry_s
    while True:
        answer = await _try(endpoint, settings, path, body)
        if answer.status == 200:
            return
        if answer.status in REFUSALS or clock() > deadline:
            raise EngineDead(
                f"{settings.first_name} is registered, but a first request to {path} failed: {answer.problem};"
                " the logs have more"
            )
        await asyncio.sleep(POLL_INTERVAL_S)


async def _try(endpoint: OwnEndpoint, settings: Settings, path: str, body: dict[str, object]) -> Answer:
    headers = {"x-request-id": FIRST_REQUEST_ID}
    try:
        if settings.router == "direct":
            headers["x-dynamo-worker-instance-id"] = await _some_instance(endpoint)
        return await endpoint.post(path, body, headers)
    except OSError as error:
        return Answer(0, str(error).encode())


def _smallest_request(settings: Settings) -> tuple[str, dict[str, object]]:
    name = settings.first_name
    if embeds(settings):
        return "/v1/embeddings", {"model": name, "input": "."}
    # Of more than one token, because a decode worker computes the last one without a prefill.
    return "/v1/completions", {"model": name, "prompt": "1 2", "max_tokens": 1}


async def _list_models(endpoint: OwnEndpoint) -> list[str]:
    """Return the names in `/v1/models`. Raises OSError if the endpoint cannot be reached or answers with an error."""
    answer = await endpoint.get("/v1/models")
    if answer.status != 200:
        raise ConnectionError(answer.problem)
    return [str(entry["id"]) for entry in json.loads(answer.body)["data"]]


async def _some_instance(endpoint: OwnEndpoint) -> str:
    """Return the id of a worker; with direct routing every request names one."""
    instances = json.loads((await endpoint.get("/health")).body).get("instances", [])
    return next((str(each["instance_id"]) for each in instances if each["endpoint"] == "generate"), "")
