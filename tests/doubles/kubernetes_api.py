"""As much of the Kubernetes API as discovery uses: EndpointSlices to watch, and custom resources to apply and watch.

    python -m tests.doubles.kubernetes_api ADDRESS PORT RECORD POD...

Each named pod is listed, with the uid `uid-of-NAME`.
Every request is recorded in a line of the file RECORD: group, resource, verb, selector.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

SLICES, METADATA = ("discovery.k8s.io/v1", "endpointslices"), ("nvidia.com/v1alpha1", "dynamoworkermetadatas")
KINDS = {"endpointslices": "EndpointSlice", "dynamoworkermetadatas": "DynamoWorkerMetadata"}


class Api:
    """Objects by resource and name, and who watches them."""

    def __init__(self, record: Path, pods: list[str]) -> None:
        self._record = record
        self._version = 1
        self._watching: list[tuple[str, asyncio.Queue[dict[str, Any]]]] = []
        endpoints = [
            {
                "addresses": ["192.0.2.1"],
                "conditions": {"ready": True},
                "targetRef": {"kind": "Pod", "name": pod, "uid": f"uid-of-{pod}"},
            }
            for pod in pods
        ]
        ready = {"metadata": {"name": "workers", "uid": "1"}, "addressType": "IPv4", "endpoints": endpoints}
        self._objects: dict[str, dict[str, dict[str, Any]]] = {"endpointslices": {}, "dynamoworkermetadatas": {}}
        self._put("endpointslices", "workers", ready)

    def app(self) -> web.Application:
        """Return the routes."""
        app = web.Application()
        for group, resource in (SLICES, METADATA):
            app.router.add_get(f"/apis/{group}/namespaces/{{namespace}}/{resource}", self._list_or_watch)
            app.router.add_patch(f"/apis/{group}/namespaces/{{namespace}}/{resource}/{{name}}", self._apply)
        app.router.add_route("*", "/{path:.*}", self._refuse)
        return app

    def _note(self, request: web.Request, verb: str) -> str:
        """Record a request; return its resource."""
        _, _, group, _, _, _, resource, *_ = request.path.split("/")
        line = {"group": group, "resource": resource, "verb": verb, "selector": request.query.get("labelSelector", "")}
        with self._record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return resource

    def _put(self, resource: str, name: str, content: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        kept = self._objects[resource].get(name)
        metadata = {"uid": f"{resource}-{name}", **content["metadata"], "resourceVersion": str(self._version)}
        metadata["generation"] = 1 + (kept or {}).get("metadata", {}).get("generation", 0)
        group = {each: version for version, each in (SLICES, METADATA)}[resource]
        made = {**content, "apiVersion": group, "kind": KINDS[resource], "metadata": metadata}
        self._objects[resource][name] = made
        for watched, queue in self._watching:
            if watched == resource:
                queue.put_nowait({"type": "MODIFIED" if kept else "ADDED", "object": made})
        return made

    async def _list_or_watch(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") not in ("true", "1"):
            resource = self._note(request, "list")
            version = request.path.split("/")
            body = {
                "apiVersion": f"{version[2]}/{version[3]}",
                "kind": f"{KINDS[resource]}List",
                "metadata": {"resourceVersion": str(self._version)},
                "items": list(self._objects[resource].values()),
            }
            return web.json_response(body)
        return await self._watch(request, self._note(request, "watch"))

    async def _watch(self, request: web.Request, resource: str) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        await stream.prepare(request)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        since = int(request.query.get("resourceVersion") or 0)
        for each in self._objects[resource].values():
            if int(each["metadata"]["resourceVersion"]) > since:
                queue.put_nowait({"type": "MODIFIED", "object": each})
        entry = (resource, queue)
        self._watching.append(entry)
        try:
            while True:
                await stream.write(json.dumps(await queue.get()).encode() + b"\n")
        finally:
            self._watching.remove(entry)

    async def _apply(self, request: web.Request) -> web.Response:
        """Creates what is not there: the verbs are those that a role must allow."""
        resource = self._note(request, "patch")
        name = request.match_info["name"]
        if name not in self._objects[resource]:
            self._note(request, "create")
        return web.json_response(self._put(resource, name, json.loads(await request.read())))

    async def _refuse(self, request: web.Request) -> web.Response:
        with self._record.open("a") as file:
            file.write(json.dumps({"unknown": f"{request.method} {request.path}"}) + "\n")
        return web.json_response({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound"}, status=404)


def main() -> None:
    """Serve until stopped."""
    address, port, record, *pods = sys.argv[1:]
    web.run_app(Api(Path(record), pods).app(), host=address, port=int(port), print=None)


if __name__ == "__main__":
    main()
