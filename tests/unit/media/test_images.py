"""Images: what is decoded to which pixels, and what is refused."""

import io
import struct
from contextlib import suppress
from typing import Any

import pytest
from PIL import Image

from baton.errors import InvalidRequest
from baton.media.images import decode_image, image_size
from baton.protocol.media import DecodeLimits, MediaFile
from tests.unit.media.media_sites import PLACE, damaged, png, png_of, png_that_claims


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def file_of(data: bytes, **limits: Any) -> MediaFile:
    return MediaFile(modality="image", data=data, place=PLACE, limits=DecodeLimits(**limits))


def pixel(data: bytes, x: int = 0, y: int = 0) -> Any:
    image = decode_image(file_of(data))
    assert image.mode == "RGB"
    return image.getpixel((x, y))


@pytest.mark.parametrize(("orientation", "corner"), [(1, (0, 0)), (3, (7, 3)), (6, (3, 0)), (8, (0, 7))])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_rotated_by_exif_in_header_and_pixels(kind: str, orientation: int, corner: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (8, 4), "black")
    image.putpixel((0, 0), (255, 255, 255))
    lossless = {"quality": 100} | ({"lossless": True} if kind == "WEBP" else {})
    data = saved(image, kind, exif=exif, **(lossless if kind != "TIFF" else {}))
    size = (4, 8) if orientation in (6, 8) else (8, 4)
    assert image_size(file_of(data)) == size
    decoded = decode_image(file_of(data))
    assert decoded.size == size
    brightness = {(x, y): sum(decoded.getpixel((x, y))) for x in range(size[0]) for y in range(size[1])}
    assert max(brightness, key=brightness.__getitem__) == corner


def test_exif_data_behind_the_pixels_rotate_nothing() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(Image.new("RGB", (4, 2)), exif=exif)
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    late = data[:start] + data[end:-12] + data[start:end] + data[-12:]
    assert image_size(file_of(late)) == decode_image(file_of(late)).size == (4, 2)


@pytest.mark.filterwarnings("ignore:.*")  # Pillow warns about the damage
def test_damaged_exif_data_rotate_nothing() -> None:
    data = saved(Image.new("RGB", (4, 2)), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert image_size(file_of(data)) == (4, 2)
    assert decode_image(file_of(data)).size == (4, 2)


def test_alpha_is_dropped_and_the_stored_colour_stays() -> None:
    assert pixel(saved(Image.new("RGBA", (2, 2), (10, 20, 30, 0)))) == (10, 20, 30)
    assert pixel(saved(Image.new("LA", (2, 2), (40, 0)))) == (40, 40, 40)


def test_palette_images_have_the_colours_of_their_palette() -> None:
    image = Image.new("P", (2, 2), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    assert pixel(saved(image)) == (0, 255, 0)
    assert pixel(saved(image, transparency=bytes([0, 128]))) == (0, 255, 0)


def test_cmyk_is_converted() -> None:
    assert pixel(saved(Image.new("CMYK", (2, 2), (0, 0, 0, 255)), "TIFF")) == (0, 0, 0)
    assert pixel(saved(Image.new("CMYK", (2, 2), (0, 0, 0, 0)), "TIFF")) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize(("value", "grey"), [(65535, 255), (32768, 128), (255, 0)])
def test_16_bit_grey_is_scaled_to_8(kind: str, value: int, grey: int) -> None:
    assert pixel(saved(Image.new("I;16", (2, 2), value), kind)) == (grey, grey, grey)


def test_16_bit_colour_is_scaled_to_8() -> None:
    assert pixel(png_of(1, 1, b"\x00" + struct.pack(">3H", 65535, 256, 0), bits=16)) == (255, 1, 0)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_more_than_16_bits_are_refused(mode: str) -> None:
    with pytest.raises(InvalidRequest, match="more than 16 bits"):
        decode_image(file_of(saved(Image.new(mode, (2, 2)), "TIFF")))


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    red, green, blue = pixel(data)
    assert red > 200
    assert green < 50
    assert blue < 50


def test_one_pixel_is_an_image() -> None:
    assert image_size(file_of(png(1, 1))) == (1, 1)
    assert decode_image(file_of(png(1, 1))).size == (1, 1)


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", png()[:40], b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_unreadable_image_is_refused_with_its_place(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        decode_image(file_of(data))
    assert refusal.value.message.startswith(PLACE)


def test_limits_apply_to_header_and_decoding() -> None:
    for read in (image_size, decode_image):
        with pytest.raises(InvalidRequest, match="11 x 10 pixels exceed the limit of 100"):
            read(file_of(png(11, 10), max_pixels=100))
        with pytest.raises(InvalidRequest, match="too narrow"):
            read(file_of(png(201, 1)))


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_damaged_images_are_refused_or_have_other_pixels_and_nothing_else(kind: str) -> None:
    for data in damaged(saved(Image.effect_noise((30, 20), 50).convert("RGB"), kind), 200):
        with suppress(InvalidRequest):
            size = image_size(file_of(data))
            assert decode_image(file_of(data)).size == size


def test_decompression_bomb_is_refused() -> None:
    for side in (8_000, 65_535):  # above our limit, and above Pillow's own
        with pytest.raises(InvalidRequest, match="exceed the limit of 50000000"):
            image_size(file_of(png_that_claims(side, side)))
