"""The rules of `Engine.encode`, for engines that encode media for others."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from baton.errors import EngineDead, InvalidRequest
from baton.media.images import probe_image
from baton.ports.engine import Encoded, EncodeEngine, EncodeWork
from baton.protocol.ids import new_request_id
from baton.protocol.media import MediaFile
from baton.testing.bounded import eventually, run_bounded
from baton.testing.fakes import running


class EncodeContract:
    """Subclass it in a test module and override `make_engine`; `held` too, for an engine that can tell."""

    limit_s = 30.0

    def make_engine(self) -> EncodeEngine:
        """Return an engine that has not been started and encodes images."""
        raise NotImplementedError("a contract test overrides make_engine")

    def held(self, engine: EncodeEngine) -> int | None:
        """Return how many images the engine holds encoded, or None if that cannot be told."""
        return None

    def encode_work(self, images: int = 1, data: bytes | None = None) -> EncodeWork:
        """Return work with so many images."""
        picture = probe_image()
        file = picture if data is None else MediaFile(modality="image", data=data, place="here[0]")
        return EncodeWork(request_id=new_request_id("encode"), token_ids=(1, 2, 3), media=(file,) * images)

    def test_an_engine_that_encodes_says_so(self) -> None:
        """Handlers go by the capabilities."""

        async def body() -> None:
            can = self.make_engine().capabilities
            assert can.media_encoding
            assert "image" in can.modalities

        self._run(body())

    @pytest.mark.parametrize("images", [1, 3])
    def test_what_was_made_is_plain_json_and_held_until_abort(self, images: int) -> None:
        """Whoever computes the prompt is in another process."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine):
                work = self.encode_work(images)
                encoded = await engine.encode(work)
                assert json.loads(json.dumps(encoded.params)) == encoded.params
                assert self.held(engine) in (None, images)
                await engine.abort(work.request_id)
                await self._nothing_held(engine)

        self._run(body())

    def test_an_id_is_in_use_until_abort(self) -> None:
        """And can be used again after it."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine):
                work = self.encode_work()
                first = await engine.encode(work)
                with pytest.raises(InvalidRequest, match="in use"):
                    await engine.encode(work)
                await engine.abort(work.request_id)
                await engine.abort(work.request_id)
                again = await engine.encode(work)
                assert first.params.keys() == again.params.keys()
                await engine.abort(work.request_id)

        self._run(body())

    def test_media_that_cannot_be_read_are_refused_by_place_and_leave_nothing(self) -> None:
        """The next request is served."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine):
                work = self.encode_work(data=b"no image at all")
                with pytest.raises(InvalidRequest, match=r"here\[0\]"):
                    await engine.encode(work)
                await self._nothing_held(engine)
                assert isinstance(await engine.encode(self.encode_work()), Encoded)

        self._run(body())

    def test_requests_at_once_do_not_mix_and_a_storm_leaves_nothing(self) -> None:
        """More than the engine does at once, a part of them cancelled at every point."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine):
                works = [self.encode_work() for _ in range(40)]
                tasks = [asyncio.create_task(engine.encode(work)) for work in works]
                for number, task in enumerate(tasks):
                    if number % 3 == 0:
                        task.cancel()
                    await asyncio.sleep(0)
                made = await asyncio.gather(*tasks, return_exceptions=True)
                assert {type(each) for each in made} <= {Encoded, asyncio.CancelledError}
                assert sum(isinstance(each, Encoded) for each in made) >= len(works) // 2
                for work in works:
                    await engine.abort(work.request_id)
                await self._nothing_held(engine)
                progress = engine.progress()
                assert progress.running + progress.waiting == 0

        self._run(body())

    def test_abort_of_an_unknown_id_is_no_error(self) -> None:
        """Aborts come whenever they come."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine):
                await engine.abort(new_request_id("nobody"))

        self._run(body())

    def test_after_stop_nothing_is_encoded_and_nothing_held(self) -> None:
        """Stopping twice is no error."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine):
                await engine.encode(self.encode_work())
            await engine.stop()
            with pytest.raises(EngineDead):
                await engine.encode(self.encode_work())

        self._run(body())

    def _run(self, body: Coroutine[Any, Any, None]) -> None:
        run_bounded(body, self.limit_s)

    async def _nothing_held(self, engine: EncodeEngine) -> None:
        await eventually(lambda: self.held(engine) in (None, 0), self.limit_s)
