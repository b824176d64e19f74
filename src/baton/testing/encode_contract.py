"""The rules of `EncodeEngine.encode` as tests."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from baton.errors import EngineDead, InvalidRequest
from baton.media.images import probe_image
from baton.ports.engine import Encoded, EncodeEngine, EncodeWork, EngineInfo
from baton.protocol.ids import new_request_id
from baton.protocol.media import EncodedItem, MediaFile
from baton.testing.bounded import eventually, run_bounded
from baton.testing.fakes import running


class EncodeContract:
    """Subclass it in a test module and override `make_engine`, and `held` if the engine can report it."""

    limit_s = 30.0

    def make_engine(self) -> EncodeEngine:
        """Return an engine that has not been started and encodes images."""
        raise NotImplementedError("a contract test overrides make_engine")

    def held(self, engine: EncodeEngine) -> int | None:
        """Return how many images the engine holds encoded, or None if that is unknown."""
        return None

    def encode_work(self, images: int = 1, data: bytes | None = None) -> EncodeWork:
        """Return work with this many images."""
        file = probe_image() if data is None else MediaFile(modality="image", data=data, place="here[0]")
        return EncodeWork(request_id=new_request_id("encode"), token_ids=(1, 2, 3), media=(file,) * images)

    def test_capabilities_include_media_encoding(self) -> None:
        """Handlers decide by the capabilities."""

        async def body() -> None:
            can = self.make_engine().capabilities
            assert can.media_encoding
            assert "image" in can.encoded_modalities

        self._run(body())

    @pytest.mark.parametrize("images", [1, 3])
    def test_every_image_is_encoded(self, images: int) -> None:
        """Handles are plain JSON, because the prompt is computed in another process, and held until abort."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine) as info:
                work = self.encode_work(images)
                encoded = await engine.encode(work)
                if encoded.params is None:
                    self._check_rows(encoded, info, images)
                else:
                    assert json.loads(json.dumps(encoded.params)) == encoded.params
                    assert self.held(engine) in (None, images)
                await engine.abort(work.request_id)
                await self._nothing_held(engine)

        self._run(body())

    def test_an_id_is_in_use_while_handles_are_held(self) -> None:
        """After abort, and when nothing is held, it can be used again."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine):
                work = self.encode_work()
                first = await engine.encode(work)
                if first.params is not None:
                    with pytest.raises(InvalidRequest, match="in use"):
                        await engine.encode(work)
                await engine.abort(work.request_id)
                await engine.abort(work.request_id)
                again = await engine.encode(work)
                assert set(first.params or ()) == set(again.params or ())
                await engine.abort(work.request_id)

        self._run(body())

    def test_unreadable_media_are_refused_by_place_and_hold_nothing(self) -> None:
        """The next request succeeds."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine):
                work = self.encode_work(data=b"no image at all")
                with pytest.raises(InvalidRequest, match=r"here\[0\]"):
                    await engine.encode(work)
                await self._nothing_held(engine)
                assert isinstance(await engine.encode(self.encode_work()), Encoded)

        self._run(body())

    def test_concurrent_and_cancelled_requests_hold_nothing_after_abort(self) -> None:
        """More requests than the engine encodes at once, a third of them cancelled at various points."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine):
                works = [self.encode_work() for _ in range(40)]
                tasks = [asyncio.create_task(engine.encode(work)) for work in works]
                for number, task in enumerate(tasks):
                    if number % 3 == 0:
                        task.cancel()
                    await asyncio.sleep(0)
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert {type(each) for each in results} <= {Encoded, asyncio.CancelledError}
                assert sum(isinstance(each, Encoded) for each in results) >= len(works) // 2
                for work in works:
                    await engine.abort(work.request_id)
                await self._nothing_held(engine)
                progress = engine.progress()
                assert progress.running + progress.waiting == 0

        self._run(body())

    def test_abort_of_an_unknown_id_is_no_error(self) -> None:
        """Aborts are idempotent."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine):
                await engine.abort(new_request_id("unknown"))

        self._run(body())

    def test_encode_after_stop_raises_engine_dead(self) -> None:
        """Stop twice is no error."""

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

    def _check_rows(self, encoded: Encoded, info: EngineInfo, images: int) -> None:
        """The same image has the same rows every time, of the type that the engine said."""
        assert info.media is not None
        shape, first = info.media.shape, encoded.items[0]
        assert first.item.embed_token == info.media.placeholders["image"].token
        assert (first.item.modality, first.dtype, first.size) == ("image", shape.dtype, shape.size)
        assert (first.data.contiguous, first.data.nbytes % (first.item.rows * first.size)) == (True, 0)
        assert msgspec.json.decode(msgspec.json.encode(first.item), type=EncodedItem) == first.item
        assert [(rows.item, bytes(rows.data)) for rows in encoded.items] == [(first.item, bytes(first.data))] * images

    async def _nothing_held(self, engine: EncodeEngine) -> None:
        await eventually(lambda: self.held(engine) in (None, 0), self.limit_s)
