"""Hostile media, each with its documented result. `docs/media.md` has the same table; `test_hostile.py` compares."""

import asyncio
import gzip
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from PIL import Image

from baton.config.media import MediaOptions
from baton.protocol.media import MediaUrl
from tests.unit.media.embedding_files import floats, safetensors
from tests.unit.media.media_sites import FakeResolver, Site, data_url, media_url, png, png_of, png_that_claims
from tests.unit.media.videos import lying_samples, video

NOT_PUBLIC = "400: the host's address is not public"
BAD_SCHEME = "400: only http, https, data and file URLs are supported"
NO_IMAGE = "400: it is not an image in a supported format"
TOO_LARGE = "400: exceed the limit of 50000000 for an image"
PICKLE = "400: PyTorch and pickle files are refused"
TOO_SLOW = "400: fetching it took longer than 0.2 s"
NO_FILE = "400: there is no such file in the directories of --media-local-dirs"
LOOPBACK = MediaOptions(private="127.0.0.1/32", max_bytes=100_000, timeout_s=3.0)
PUBLIC = MediaOptions(timeout_s=3.0)
IMPATIENT = msgspec.structs.replace(LOOPBACK, timeout_s=0.2)
EMPTY_GIF = b"GIF89a\x01\x00\x01\x00\x80\x00\x00\x00\x00\x00\xff\xff\xff"
GIF_FRAME = b"\x21\xf9\x04\x00\x01\x00\x00\x00\x2c\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02\x44\x01\x00"


class Lab(msgspec.Struct):
    """What a case can use: a server on loopback, and a directory that clients may read files of."""

    server: Site
    directory: Path


class Case(msgspec.Struct):
    """The media that `urls` names are loaded and decoded under `options`. `result` is how that ends."""

    name: str
    result: str
    urls: Callable[[Lab], list[MediaUrl]]
    options: MediaOptions = PUBLIC
    names: tuple[str, ...] = ()

    @property
    def resolver(self) -> FakeResolver | None:
        return FakeResolver(*self.names) if self.names else None


def url(text: str, modality: str = "image") -> Callable[[Lab], list[MediaUrl]]:
    return lambda _: [media_url(text, modality)]


def served(path: str, modality: str = "image", host: str = "127.0.0.1") -> Callable[[Lab], list[MediaUrl]]:
    return lambda lab: [media_url(lab.server.url(path, host), modality)]


def local(path: str) -> Callable[[Lab], list[MediaUrl]]:
    return lambda lab: [media_url(f"file://{lab.directory}/{path}")]


def content(make: Callable[[], bytes], modality: str = "image") -> Callable[[Lab], list[MediaUrl]]:
    return lambda _: [media_url(data_url(make()), modality)]


def rows(make: Callable[[], bytes]) -> Callable[[Lab], list[MediaUrl]]:
    return lambda _: [media_url(data_url(make(), "application/safetensors"))]


def image(mode: str, kind: str, size: tuple[int, int] = (4, 2), color: Any = 0, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, color).save(file, kind, **options)
    return file.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return image("RGB", "JPEG", (4, 2), (255, 255, 255), exif=exif)


def transparent_palette() -> bytes:
    picture = Image.new("P", (2, 2), 1)
    picture.putpalette([255, 0, 0, 0, 255, 0])
    file = io.BytesIO()
    picture.save(file, "PNG", transparency=bytes([0, 0]))
    return file.getvalue()


def animated() -> bytes:
    frames = [Image.new("RGB", (2, 2), color) for color in ("white", "black")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:] * 50)
    return file.getvalue()


def text_bomb() -> bytes:
    text = b"c\x00\x00" + zlib.compress(bytes(20_000_000), 1)
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    return png()[:33] + chunk + png()[33:]


def header(entry: str, body: bytes) -> bytes:
    return len(entry).to_bytes(8, "little") + entry.encode() + body


def prepare(directory: Path) -> None:
    """Fill the directory of local files."""
    allowed = directory / "allowed"
    allowed.mkdir()
    (directory / "secret.png").write_bytes(png())
    (allowed / "link.png").symlink_to("../secret.png")
    (allowed / "parent").symlink_to("..")
    os.mkfifo(allowed / "pipe.png")
    with (allowed / "sparse.png").open("wb") as file:
        file.truncate(10**12)


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer as the path says."""
    redirects = {
        "/to-private": "http://10.0.0.1/a.png",
        "/to-metadata": "http://169.254.169.254/latest/meta-data/",
        "/to-file": "file:///etc/passwd",
        "/to-data": "data:image/png;base64,AAAA",
        "/loop": "/loop",
        "/rebind": f"http://other.example.com:{request.url.port}/end",
    }
    if request.path in redirects:
        raise web.HTTPFound(redirects[request.path])
    if request.path in ("/drip", "/endless", "/short", "/silent"):
        return await misbehave(request)
    if request.path == "/gzip":
        return web.Response(body=gzip.compress(bytes(10_000_000), 1), headers={"Content-Encoding": "gzip"})
    if request.path == "/headers":
        return web.Response(headers={"X-Long": "a" * 1_000_000})
    if request.path == "/forbidden":
        return web.Response(status=403, text="a secret of the network")
    return web.Response(body=png())


async def misbehave(request: web.Request) -> web.StreamResponse:
    if request.path == "/silent":
        await asyncio.sleep(60)
    response = web.StreamResponse(headers={"Content-Length": "5000"} if request.path == "/short" else {})
    await response.prepare(request)
    if request.path == "/short":
        await response.write(bytes(100))
        assert request.transport is not None
        request.transport.close()
        return response
    pause, piece = (0.02, b".") if request.path == "/drip" else (0.0, bytes(50_000))
    while True:
        await response.write(piece)
        await asyncio.sleep(pause)


ADDRESSES = [
    Case("a name that resolves to loopback", NOT_PUBLIC, url("http://a.example.com/"), names=("127.0.0.1",)),
    Case("a name that resolves to a private address", NOT_PUBLIC, url("http://a.example.com/"), names=("10.0.0.5",)),
    Case("a name of the metadata service", NOT_PUBLIC, url("http://a.example.com/"), names=("169.254.169.254",)),
    Case("a name of Azure's agent, 168.63.129.16", NOT_PUBLIC, url("http://a.example.com/"), names=("168.63.129.16",)),
    Case("a name of Oracle's metadata, 192.0.0.192", NOT_PUBLIC, url("http://a.example.com/"), names=("192.0.0.192",)),
    Case("a name that resolves to fec0::1", NOT_PUBLIC, url("http://a.example.com/"), names=("fec0::1",)),
    Case("localhost", NOT_PUBLIC, served("/", host="localhost")),
    Case("127.0.0.1", NOT_PUBLIC, served("/")),
    Case("127.0.0.1. with a dot at its end", NOT_PUBLIC, served("/", host="127.0.0.1.")),
    Case("2130706433", "400: 2130706433 is not an address", served("/", host="2130706433")),
    Case("0x7f000001", "400: 0x7f000001 is not an address", served("/", host="0x7f000001")),
    Case("0177.0.0.1", "400: 0177.0.0.1 is not an address", served("/", host="0177.0.0.1")),
    Case("127.1", "400: 127.1 is not an address", served("/", host="127.1")),
    Case("127.0.0.1 in full-width digits", NOT_PUBLIC, served("/", host="１２７.０.０.１")),  # noqa: RUF001
    Case("0.0.0.0", NOT_PUBLIC, served("/", host="0.0.0.0")),
    Case("[::1]", NOT_PUBLIC, url("http://[::1]/")),
    Case("[::ffff:127.0.0.1]", NOT_PUBLIC, url("http://[::ffff:127.0.0.1]/")),
    Case("[::127.0.0.1]", NOT_PUBLIC, url("http://[::127.0.0.1]/")),
    Case("[::ffff:0:127.0.0.1]", NOT_PUBLIC, url("http://[::ffff:0:127.0.0.1]/")),
    Case("[64:ff9b::7f00:1]", NOT_PUBLIC, url("http://[64:ff9b::7f00:1]/")),
    Case("[64:ff9b:1::7f00:1]", NOT_PUBLIC, url("http://[64:ff9b:1::7f00:1]/")),
    Case("[2002:7f00:1::], 6to4", NOT_PUBLIC, url("http://[2002:7f00:1::]/")),
    Case("[2001:0:5ef5::1], Teredo", NOT_PUBLIC, url("http://[2001:0:5ef5::1]/")),
    Case("[2606:4700::5efe:7f00:1], ISATAP", NOT_PUBLIC, url("http://[2606:4700::5efe:7f00:1]/")),
    Case("[fe80::1]", NOT_PUBLIC, url("http://[fe80::1]/")),
    Case(
        "[fd00:ec2::254], with fd00::/8 allowed",
        NOT_PUBLIC,
        url("http://[fd00:ec2::254]/"),
        MediaOptions(private="fd00::/8"),
    ),
    Case(
        "a name that resolves to another address at the second lookup",
        NOT_PUBLIC,
        served("/rebind", host="a.example.com"),
        LOOPBACK,
        ("127.0.0.1", "10.0.0.1"),
    ),
    Case("a redirect to a private address", NOT_PUBLIC, served("/to-private"), LOOPBACK),
    Case("a redirect to the metadata service", NOT_PUBLIC, served("/to-metadata"), LOOPBACK),
    Case(
        "a redirect to a file: URL",
        "400: only http, https, data and file URLs are supported",
        served("/to-file"),
        LOOPBACK,
    ),
    Case(
        "a redirect to a data: URL",
        "400: only http, https, data and file URLs are supported",
        served("/to-data"),
        LOOPBACK,
    ),
    Case("a redirect without end", "400: the host redirects more than 5 times", served("/loop"), LOOPBACK),
    Case("a user name and password", "400: the URL contains a user name or password", url("http://a:b@example.com/")),
    Case("gopher:", BAD_SCHEME, url("gopher://example.com/")),
]

SERVERS = [
    Case("a host that sends a byte now and then", TOO_SLOW, served("/drip"), IMPATIENT),
    Case("a host that never answers", TOO_SLOW, served("/silent"), IMPATIENT),
    Case("a body without end", "400: it is larger than the limit of 100000 bytes", served("/endless"), LOOPBACK),
    Case("a body that ends too early", "400: the host did not send it", served("/short"), LOOPBACK),
    Case("a compressed body of 10 MB", NO_IMAGE, served("/gzip"), LOOPBACK),
    Case("a header of 1 MB", "400: the host did not send it", served("/headers"), LOOPBACK),
    Case("an error of the host", "400: the host answered with status 403", served("/forbidden"), LOOPBACK),
]

DATA_URLS = [
    Case("a data: URL without a comma", "400: the data URL has no data", url("data:image/png;base64")),
    Case("a data: URL that is not base64", "400: the data URL is not base64", url("data:image/png;base64,@@@@")),
    Case("an empty data: URL", NO_IMAGE, url("data:image/png;base64,")),
    Case(
        "a data: URL above the limit of an item",
        "400: it is larger than the limit of 1000 bytes",
        content(lambda: bytes(1001)),
        MediaOptions(max_bytes=1000),
    ),
]

IMAGES = [
    Case(
        "a PNG that claims 65,535 x 65,535 pixels",
        TOO_LARGE,
        content(lambda: png_that_claims(65535, 65535)),
    ),
    Case("a PNG that claims 8,000 x 8,000 pixels", TOO_LARGE, content(lambda: png_that_claims(8000, 8000))),
    Case(
        "a PNG that claims more rows than it has",
        "400: cannot read the image",
        content(lambda: png_of(30, 30, b"\x00" * 100)),
    ),
    Case("a PNG with 20 MB of compressed text", NO_IMAGE, content(text_bomb)),
    Case("a truncated PNG", "400: cannot read the image", content(lambda: png(300, 200)[:200])),
    Case(
        "a truncated JPEG",
        "400: cannot read the image",
        content(lambda: image("RGB", "JPEG", (300, 200), (90, 10, 10))[:1000]),
    ),
    Case("HTML", NO_IMAGE, content(lambda: b"<html></html>")),
    Case("SVG", NO_IMAGE, content(lambda: b"<svg xmlns='http://w3.org/svg'/>")),
    Case("PostScript", NO_IMAGE, content(lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n")),
    Case("an image of 1 x 201 pixels", "400: too narrow", content(lambda: png(1, 201))),
    Case("a TIFF of 32-bit floats", "400: more than 16 bits for a channel", content(lambda: image("F", "TIFF"))),
    Case("an image of 1 x 1 pixels", "taken: 1 x 1, first pixel (1, 2, 3)", content(lambda: png(1, 1))),
    Case("an animated GIF", "taken: 2 x 2, first pixel (255, 255, 255)", content(animated)),
    Case("a CMYK JPEG", "taken: 4 x 2, first pixel (255, 255, 255)", content(lambda: image("CMYK", "JPEG"))),
    Case(
        "a PNG of 16 bits",
        "taken: 4 x 2, first pixel (128, 128, 128)",
        content(lambda: image("I;16", "PNG", color=32768)),
    ),
    Case("a JPEG rotated by EXIF", "taken: 2 x 4, first pixel (255, 255, 255)", content(rotated)),
    Case(
        "a transparent pixel",
        "taken: 4 x 2, first pixel (9, 8, 7)",
        content(lambda: image("RGBA", "PNG", color=(9, 8, 7, 0))),
    ),
    Case("a palette with transparency", "taken: 2 x 2, first pixel (0, 255, 0)", content(transparent_palette)),
]

FILES = [
    Case("a file: URL, by default", "400: file URLs are not enabled (--media-local-dirs)", url("file:///etc/passwd")),
    Case("file:///etc/passwd", NO_FILE, url("file:///etc/passwd")),
    Case("file:///proc/self/environ", NO_FILE, url("file:///proc/self/environ")),
    Case("a path with ..", NO_FILE, local("../secret.png")),
    Case("a path with %2e%2e%2f", NO_FILE, local("%2e%2e%2fsecret.png")),
    Case("a path with %00", NO_FILE, local("%00.png")),
    Case("a link to a file outside", NO_FILE, local("link.png")),
    Case("a link to a directory outside", NO_FILE, local("parent/secret.png")),
    Case("a named pipe", "400: it is not a regular file", local("pipe.png")),
    Case("a file: URL of a directory", "400: it is not a regular file", local("sub")),
    Case("a sparse file of 1 TB", "400: it is larger than the limit of 50000000 bytes", local("sparse.png")),
]

EMBEDDINGS = [
    Case(
        "a safetensors header longer than the file",
        "400: its header is longer than the file",
        rows(lambda: b"\xff" * 8 + b"{}"),
    ),
    Case(
        "a safetensors shape that its offsets contradict",
        "400: its header is wrong: a takes 4000000 bytes",
        rows(lambda: header('{"a":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}}', bytes(4))),
    ),
    Case(
        "safetensors that do not fill the file",
        "400: the tensors do not fill the file",
        rows(lambda: header('{"a":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}', bytes(64))),
    ),
    Case(
        "embeddings that are not numbers",
        "400: infinite or not a number",
        rows(lambda: safetensors(a=floats([1, 1], float("nan")))),
    ),
    Case(
        "safetensors with unknown tensors",
        "400: it has unknown tensors: weights",
        rows(lambda: safetensors(mm_embeddings=floats([1, 1], 1.0), weights=floats([1], 1.0))),
    ),
    Case("a .pt file", PICKLE, url("http://example.com/a.pt")),
    Case("a zip archive as safetensors", PICKLE, rows(lambda: b"PK\x03\x04" * 9)),
    Case("a pickle as an image", PICKLE, content(lambda: b"\x80\x04\x95" + bytes(9))),
]

VIDEOS = [
    Case(
        "a GIF of a million frames",
        "400: the video has more than the limit of 108000 frames",
        content(lambda: EMPTY_GIF + GIF_FRAME * 1_000_000 + b";", "video"),
        MediaOptions(max_video_s=1e9),
    ),
    Case(
        "an MP4 whose header claims a million frames",
        "400: its header names more samples than the file has room for",
        content(lambda: lying_samples(video(), 1_000_000), "video"),
    ),
    Case(
        "three frames over nine days",
        "400: exceeds the limit of 3600 s",
        content(lambda: video(3, 1, "matroska", seconds_between=400_000), "video"),
    ),
    Case(
        "frames above the limit of pixels",
        "400: the limit of 500 for a frame",
        content(video, "video"),
        MediaOptions(max_frame_pixels=500),
    ),
    Case(
        "frames above the limit for all of them",
        "400: exceed the limit of 2000 pixels for the frames of a video",
        content(video, "video"),
        MediaOptions(max_video_pixels=2000),
    ),
    Case("a truncated MP4", "400: cannot read the video", content(lambda: video()[:400], "video")),
    Case(
        "a playlist that names other URLs",
        "400: it is not a video in a supported format",
        content(lambda: b"#EXTM3U\n#EXTINF:1,\nhttp://10.0.0.1/\n", "video"),
    ),
    Case("an image as a video", "400: it is not a video in a supported format", content(png, "video")),
]

LIMITS = [
    Case(
        "33 items",
        "400: 33 items exceed the limit of 32 for a request",
        lambda _: [media_url(data_url(png())) for _ in range(33)],
    ),
    Case(
        "items that exceed the limit of a request together",
        "400: exceed the limit of 1000 bytes for a request",
        lambda _: [media_url(data_url(bytes(400)), "audio") for _ in range(3)],
        MediaOptions(max_request_bytes=1000),
    ),
]

CASES = [*ADDRESSES, *SERVERS, *DATA_URLS, *IMAGES, *FILES, *EMBEDDINGS, *VIDEOS, *LIMITS]
