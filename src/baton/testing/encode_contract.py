"""The rules of `EncodeEngine.encode` as tests: `RowsContract` for engines that return rows, else `HandlesContract`."""

import asyncio
import io
import json
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from PIL import Image

from baton.engine_kit.content_hash import rows_hash
from baton.errors import EngineDead, InvalidRequest
from baton.media.embedding_store import ITEM_BYTES
from baton.media.images import probe_image
from baton.ports.engine import Encoded, EncodeEngine, EncodeWork, EngineInfo
from baton.protocol.ids import new_request_id
from baton.protocol.media import EncodedItem, MediaFile
from baton.testing.bounded import eventually, run_bounded
from baton.testing.fakes import running


class EncodeContract:
    """The rules for every engine that encodes. Subclass `RowsContract` or `HandlesContract` instead."""

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


class HandlesContract(EncodeContract):
    """For engines that hold what they encode.

    Subclass it in a test module and override `make_engine`, and `held` if the engine can report it.
    """

    @pytest.mark.parametrize("images", [1, 3])
    def test_encoded_media_are_plain_json_and_held_until_abort(self, images: int) -> None:
        """The prompt is computed in another process."""

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
        """After abort it can be used again."""

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
                assert set(first.params or ()) == set(again.params or ())
                await engine.abort(work.request_id)

        self._run(body())


class RowsContract(EncodeContract):
    """For engines that return rows. Subclass it in a test module and override `make_engine`."""

    def image(self, colour: int) -> MediaFile:
        """Return an image; another number gives another one."""
        file = io.BytesIO()
        Image.new("RGB", (40 + colour, 30), (colour, 7, 9)).save(file, "PNG")
        return MediaFile(modality="image", data=file.getvalue())

    def test_every_modality_that_is_encoded_has_a_placeholder(self) -> None:
        """Typed ones are told from those of the template, and are no special token then."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine) as info:
                assert info.media is not None
                assert set(info.media.placeholders) >= engine.capabilities.encoded_modalities
                tokens = {each.token for each in info.media.placeholders.values()}
                for each in info.media.placeholders.values():
                    assert each.as_text
                    assert tokens.isdisjoint(each.as_text)

        self._run(body())

    def test_each_file_gets_its_rows_in_order(self) -> None:
        """The rows have the shape of `EngineInfo.media`, and the hash that handlers look them up by."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine) as info:
                assert info.media is not None
                shape = info.media.shape
                files = tuple(map(self.image, (1, 2, 1)))
                work = EncodeWork(request_id=new_request_id("rows"), token_ids=(1,), media=files)
                first, second, third = (await engine.encode(work)).items
                for file, rows in zip(files, (first, second, third), strict=True):
                    assert (rows.dtype, rows.size) == (shape.dtype, shape.size)
                    assert rows.item.content_hash == rows_hash(shape.model, file.data, file.modality)
                    assert rows.item.rows > 0
                    assert rows.data.nbytes == rows.item.rows * shape.size * ITEM_BYTES[shape.dtype]
                assert first.item == third.item
                assert first.data.tobytes() == third.data.tobytes() != second.data.tobytes()

        self._run(body())

    def test_nothing_is_held_after_the_call(self) -> None:
        """The id can be used again at once."""

        async def body() -> None:
            engine = self.make_engine()
            async with running(engine):
                work = self.encode_work()
                once, again = await engine.encode(work), await engine.encode(work)
                assert [each.item for each in once.items] == [each.item for each in again.items]
                assert (once.params, again.params) == (None, None)

        self._run(body())
