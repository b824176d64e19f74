"""Simulated requests: each is planned to its end when it begins, hop by hop, through every role of a deployment."""

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.view.fake_deployment import FakeDeployment, FakeProcess

MODEL = "Qwen/Qwen2.5-7B-Instruct"
KV_BYTES_PER_TOKEN = 57_344
BLOCK = 16
CHUNK = 512

Json = dict[str, object]


class FakeHop:
    """One request in one process, planned to its end."""

    def __init__(self, trace: str, parent: str | None, role: str, begin_us: int) -> None:
        self.id = secrets.token_hex(8)
        self.trace, self.parent, self.role = trace, parent, role
        self.span = secrets.token_hex(8)
        self.begin_us = begin_us
        self.events: list[tuple[int, str, Json]] = [(0, "received", {})]
        self.gaps: list[int] = []
        self.duration_us = 0
        self.state = "completed"
        self.error: Json | None = None
        self.prompt = self.cached = self.completion = 0
        self.sequence = 0

    @property
    def end_us(self) -> int:
        return self.begin_us + self.duration_us

    def mark(self, at_us: float, phase: str, **detail: object) -> None:
        self.events.append((int(at_us), phase, detail))

    def end(self, at_us: float, state: str = "completed", error: Json | None = None) -> None:
        self.duration_us, self.state, self.error = int(at_us), state, error
        self.mark(at_us, "finished")

    def report(self, now_us: int) -> Json:
        """Return what a report at `now_us` has of it. It has ended once it has a sequence."""
        elapsed, ended = now_us - self.begin_us, self.sequence > 0
        gaps = self.gaps if ended else self._gaps_until(elapsed)
        return {
            "sequence": self.sequence,
            "request_id": self.id,
            "client_id": None,
            "trace_id": self.trace,
            "span_id": self.span,
            "parent_span_id": self.parent,
            "role": self.role,
            "model": MODEL,
            "started_unix_us": self.begin_us,
            "state": self.state if ended else None,
            "error": self.error if ended else None,
            "duration_us": self.duration_us if ended else elapsed,
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "completion_tokens": self.completion if ended else min(len(gaps), self.completion),
            "events": [each for each in sorted(self.events, key=lambda each: each[0]) if ended or each[0] <= elapsed],
            "gaps_us": gaps,
            "outputs_per_gap": 1,
        }

    def _gaps_until(self, elapsed: int) -> list[int]:
        at = next((at for at, phase, _ in self.events if phase == "first_token"), elapsed)
        gaps = []
        for gap in self.gaps:
            at += gap
            if at > elapsed:
                break
            gaps.append(gap)
        return gaps


class RequestPlan:
    """Plans one request; `kind` is chat, image, slow, failed, retried or long, which lasts for minutes."""

    def __init__(self, fake: "FakeDeployment", now_us: int, kind: str) -> None:
        self.fake, self.kind, self.draw = fake, kind, fake.random
        self.trace = secrets.token_hex(16)
        self.prompt = int(self.draw.lognormvariate(6.6, 0.7))
        self.cached = self.prompt // BLOCK * BLOCK // 2 if self.draw.random() < 0.35 else 0
        self.tokens = 20_000 if kind == "long" else max(4, int(self.draw.lognormvariate(4.3, 0.6)))
        pools = sorted({process.pool for process in fake.of("decode") if process.pool})
        self.pool = self.draw.choice(pools) if pools else None
        self.at = float(now_us)
        self.outer: list[FakeHop] = []

    def plan(self) -> str:
        """Plan all hops and return the trace id."""
        self._frontend()
        self._router()
        self._encode()
        self._workers()
        return self.trace

    def _hop(self, role: str) -> tuple[FakeHop, "FakeProcess"]:
        found = self.fake.of(role)
        process = self.draw.choice([each for each in found if not each.pool or each.pool == self.pool])
        hop = FakeHop(self.trace, self.outer[-1].span if self.outer else None, role, int(self.at))
        hop.prompt, hop.cached = self.prompt, self.cached
        process.hops.append(hop)
        return hop, process

    def _frontend(self) -> None:
        root, _ = self._hop("frontend")
        root.mark(150, "admitted")
        root.mark(900 + self.prompt, "forwarded")
        self.at += 1200 + self.prompt
        self.outer.append(root)

    def _router(self) -> None:
        if not self.fake.of("router"):
            return
        router, _ = self._hop("router")
        router.mark(120, "pool_selected", pool=self.pool, role="prefill", ttft_ms=400.0, itl_ms=18.0)
        if self.kind == "retried":
            router.mark(9000, "retried", pool=self.pool, code="engine_dead")
            self.at += 9000
        self.at += 400
        self.outer.append(router)

    def _encode(self) -> None:
        if self.kind != "image" or not self.fake.of("encode"):
            return
        encode, _ = self._hop("encode")
        encode.mark(100, "admitted")
        encode.mark(22_000, "media_fetched", bytes=381_222, items=1)
        encode.mark(88_000, "encoded", items=1)
        encode.end(89_000)
        self.at += 91_000

    def _workers(self) -> None:
        prefill, worker = self._hop("prefill")
        computed_us = self._compute(prefill)
        self.at += 300
        decode, _ = self._hop("decode")
        decode.mark(80, "admitted")
        decode.mark(200, "submitted")
        decode.mark(300, "kv_claimed")
        if self.kind == "failed":
            self._fail(prefill, decode, worker.name, computed_us)
        else:
            self._decode(prefill, decode, computed_us)

    def _compute(self, prefill: FakeHop) -> int:
        """Plan the prompt, chunk by chunk, and return the time of its last one."""
        slower = 1.6 if self.kind == "slow" else 1.0
        at = 400 + self.draw.expovariate(1 / 9000) * (14 if self.kind == "slow" else 1)
        for when, phase in ((90, "admitted"), (350, "submitted"), (400, "queued"), (420, "kv_offered")):
            prefill.mark(when, phase)
        prefill.mark(at, "first_step")
        for begin in range(0, self.prompt - self.cached, CHUNK):
            size = min(CHUNK, self.prompt - self.cached - begin)
            at += size * self.draw.uniform(85, 110) * slower
            prefill.mark(at, "prefill_chunk", tokens=size)
        prefill.completion = 1
        return prefill.begin_us + int(at)

    def _fail(self, prefill: FakeHop, decode: FakeHop, worker: str, computed_us: int) -> None:
        error: Json = {"code": "engine_failed", "message": "CUDA out of memory while computing a prompt chunk"}
        prefill.end(computed_us - prefill.begin_us + 300, "failed", error)
        lost: Json = {"code": "peer_lost", "message": f"{worker} ended its lease: engine_failed"}
        decode.end(computed_us - decode.begin_us + 900, "failed", lost)
        for hop in self.outer:
            hop.end(computed_us - hop.begin_us + 2500, "failed", error)

    def _decode(self, prefill: FakeHop, decode: FakeHop, computed_us: int) -> None:
        moved = self.prompt * KV_BYTES_PER_TOKEN
        transport = self.draw.choice(["shm", "shm", "tcp"])
        took = 300 + moved / (45e3 if transport == "shm" else 6e3)
        arrived = computed_us - decode.begin_us + took
        decode.mark(arrived, "kv_moved", transport=transport, bytes=moved)
        decode.mark(arrived + 500, "first_step")
        first = arrived + 9000
        decode.mark(first, "first_token")
        decode.gaps = self._gaps()
        state = "cancelled" if self.draw.random() < 0.04 else "completed"
        if state == "cancelled":
            decode.gaps = decode.gaps[: self.tokens // 2]
        decode.completion = len(decode.gaps) + 1
        ended = first + sum(decode.gaps)
        decode.end(ended + 300, state)
        prefill.mark(computed_us - prefill.begin_us + 200, "first_token")
        prefill.end(computed_us - prefill.begin_us + took + 900)
        for hop in reversed(self.outer):
            hop.completion, hop.gaps = decode.completion, decode.gaps
            shift = decode.begin_us - hop.begin_us + 400
            hop.mark(first + shift, "first_token")
            hop.end(ended + shift + 400, state)

    def _gaps(self) -> list[int]:
        base = 11_000 if self.kind != "slow" else 24_000
        return [
            int(base * self.draw.lognormvariate(0, 0.16)) + (60_000 if self.draw.random() < 0.008 else 0)
            for _ in range(self.tokens)
        ]
