"""Loading the media of whole requests: order, limits, kinds of items, and bytes that are free again."""

import asyncio
import threading
from pathlib import Path

import pytest
from aiohttp import web

from baton.config.media import MediaOptions
from baton.errors import ConfigError, InvalidRequest, Overloaded
from baton.media.decoding import run_decoding
from baton.media.images import decode_image
from baton.media.loader import PolicyLoader
from baton.protocol.media import EmbeddingFile, MediaFile
from baton.testing import eventually, run_bounded
from tests.unit.media.embedding_files import floats, safetensors
from tests.unit.media.media_sites import LOCAL_NETWORK, PLACE, data_url, media_url, png, site
from tests.unit.media.videos import video


def test_all_media_of_a_request_are_loaded_in_order_or_none() -> None:
    async def body() -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            if request.path == "/broken":
                return web.Response(body=b"<html>")
            return web.Response(body=png(int(request.path[1:])))

        loader = PolicyLoader(MediaOptions(private=LOCAL_NETWORK, max_items=3, max_pixels=100))
        async with site(answer) as server:
            urls = [media_url(server.url(f"/{width}")) for width in (7, 5, 3)]
            files = await loader.load(urls)
            assert [file.size for file in files if isinstance(file, MediaFile)] == [(7, 2), (5, 2), (3, 2)]
            assert server.requests == ["/7", "/5", "/3"] or len(server.requests) == 3, "each is fetched once"
            with pytest.raises(InvalidRequest, match="not an image"):
                await loader.load([urls[0], media_url(server.url("/broken"))])
            with pytest.raises(InvalidRequest, match=r"51 x 2 pixels exceed the limit of 100"):
                await loader.load([media_url(server.url("/51"))])
            [sound] = await loader.load([media_url(server.url("/broken"), "audio")])
            assert sound.data == b"<html>", "only images and videos are checked"
            server.requests.clear()
            with pytest.raises(InvalidRequest, match="4 items"):
                await loader.load([*urls, urls[0]])
            assert server.requests == []
        await loader.close()
        await loader.close()

    run_bounded(body())


def test_embedding_files_and_videos_from_every_kind_of_source(tmp_path: Path) -> None:
    async def body() -> None:
        embeddings, clip = safetensors(rows=floats([2, 1], 1.0, 2.0)), video()
        (tmp_path / "rows.safetensors").write_bytes(embeddings)

        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(body=embeddings if request.path.endswith(".safetensors") else clip)

        loader = PolicyLoader(MediaOptions(private=LOCAL_NETWORK, local_dirs=str(tmp_path)))
        async with site(answer) as server:
            loaded = await loader.load(
                [
                    media_url(server.url("/a.safetensors")),
                    media_url(f"file://{tmp_path}/rows.safetensors", "video"),
                    media_url(data_url(embeddings, "application/safetensors")),
                    media_url(server.url("/clip"), "video"),
                ]
            )
        assert [type(item) for item in loaded] == [EmbeddingFile, EmbeddingFile, EmbeddingFile, MediaFile]
        assert [item.modality for item in loaded] == ["image", "video", "image", "video"]
        assert isinstance(loaded[3], MediaFile)
        assert loaded[3].size == (32, 24)
        await loader.close()

    run_bounded(body())


def test_bytes_are_held_while_the_files_exist_and_no_longer() -> None:
    async def body() -> None:
        loader = PolicyLoader(MediaOptions())
        picture = png(50, 50)
        files = await loader.load([media_url(data_url(picture)), media_url(data_url(picture))])
        assert loader.held_bytes == 2 * len(picture)
        del files
        assert loader.held_bytes == 0
        with pytest.raises(InvalidRequest):
            await loader.load([media_url(data_url(picture)), media_url(data_url(b"no image"))])
        await eventually(lambda: loader.held_bytes == 0)
        await loader.close()

    run_bounded(body())


def test_cancelled_load_holds_nothing() -> None:
    async def body() -> None:
        never = asyncio.Event()

        async def drip(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(bytes(10_000))
            await never.wait()
            return response

        loader = PolicyLoader(MediaOptions(private=LOCAL_NETWORK))
        async with site(drip) as server:
            loading = asyncio.create_task(loader.load([media_url(server.url())]))
            await eventually(lambda: loader.held_bytes == 10_000)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            assert loader.held_bytes == 0
            never.set()
        await loader.close()

    run_bounded(body())


def test_waiting_and_fetching_share_one_time_limit() -> None:
    async def body() -> None:
        never = asyncio.Event()

        async def wait(_: web.Request) -> web.StreamResponse:
            await never.wait()
            return web.Response()

        loader = PolicyLoader(MediaOptions(private=LOCAL_NETWORK, timeout_s=0.05))
        async with site(wait) as server:
            with pytest.raises(InvalidRequest, match=r"image_url.0.: fetching it took longer than 0\.05 s"):
                await loader.load([media_url(server.url())])
            never.set()
        await loader.close()

    run_bounded(body())


def test_loading_does_not_wait_for_decoding() -> None:
    async def body() -> None:
        done = threading.Event()
        decoding = [asyncio.create_task(run_decoding(done.wait, 30)) for _ in range(8)]
        await asyncio.sleep(0)
        loader = PolicyLoader(MediaOptions())
        assert len(await loader.load([media_url(data_url(png())), media_url(data_url(video()), "video")])) == 2
        assert not any(task.done() for task in decoding)
        done.set()
        await asyncio.gather(*decoding)
        await loader.close()

    run_bounded(body())


def test_limits_of_a_request_and_of_all_requests_say_which() -> None:
    async def body() -> None:
        picture = png(50, 50)
        room = MediaOptions(max_request_bytes=2 * len(picture), max_total_bytes=3 * len(picture), timeout_s=0.05)
        loader = PolicyLoader(room)
        one = media_url(data_url(picture))
        with pytest.raises(InvalidRequest, match="for a request"):
            await loader.load([one, one, one, one])
        held = [await loader.load([one]), await loader.load([one])]
        with pytest.raises(Overloaded, match="--media-max-total-bytes"):
            await loader.load([one, one])
        held.clear()
        assert len(await loader.load([one, one])) == 2
        await loader.close()

    run_bounded(body())


def test_what_is_fetched_counts_as_it_arrives() -> None:
    async def body() -> None:
        async def answer(_: web.Request) -> web.StreamResponse:
            return web.Response(body=bytes(600))

        loader = PolicyLoader(MediaOptions(private=LOCAL_NETWORK, max_request_bytes=1000))
        async with site(answer) as server:
            one = media_url(server.url(), "audio")
            assert len(await loader.load([one])) == 1
            with pytest.raises(InvalidRequest, match="limit of 1000 bytes for a request"):
                await loader.load([one, one])
        assert loader.held_bytes == 0
        await loader.close()

    run_bounded(body())


def test_pickles_are_refused_whatever_they_are_called() -> None:
    async def body() -> None:
        loader = PolicyLoader(MediaOptions())
        with pytest.raises(InvalidRequest, match=f"^{PLACE.replace('[', '.').replace(']', '.')}: PyTorch and pickle"):
            await loader.load([media_url(data_url(b"PK\x03\x04archive/data.pkl"))])
        await loader.close()

    run_bounded(body())


def test_decoding_runs_on_threads_of_its_own() -> None:
    async def body() -> None:
        [file] = await PolicyLoader(MediaOptions()).load([media_url(data_url(png(4, 3)))])
        assert isinstance(file, MediaFile)
        assert (await run_decoding(decode_image, file)).size == (4, 3)
        assert (await run_decoding(lambda: threading.current_thread().name)).startswith("media-decode")

    run_bounded(body())


def test_the_limit_of_all_requests_has_room_for_one() -> None:
    with pytest.raises(ConfigError, match="--media-max-total-bytes"):
        PolicyLoader(MediaOptions(max_total_bytes=10, max_request_bytes=11))
