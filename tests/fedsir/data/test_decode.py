from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fedsir.data.decode import BadImageError, decode_grey, pixel_hash, resize

Grey = NDArray[np.uint8]


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_grey_png_is_returned_as_it_is(grey: Callable[..., Grey]) -> None:
    picture = grey(1)
    found = decode_grey(encode(Image.fromarray(picture), "PNG"))
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, picture)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_grey_stored_as_rgb_gives_its_grey_values(grey: Callable[..., Grey], kind: str) -> None:
    picture = grey(2)
    image = Image.fromarray(np.repeat(picture[..., None], 3, axis=2))
    np.testing.assert_array_equal(decode_grey(encode(image, kind)), picture)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_is_scaled_by_the_full_range(kind: str) -> None:
    values = np.array([[0, 257, 32768], [65535, 128, 129]], dtype=np.uint16)
    expected = np.round(values / 257.0).astype(np.uint8)
    np.testing.assert_array_equal(decode_grey(encode(Image.fromarray(values), kind)), expected)


def test_palette_uses_the_colours_and_not_the_indices() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([200, 200, 200, 10, 10, 10])
    image.putdata([0, 1])
    np.testing.assert_array_equal(decode_grey(encode(image, "PNG")), [[200, 10]])


def test_transparent_pixels_are_black_in_every_form() -> None:
    rgba = Image.fromarray(np.array([[[90, 90, 90, 255], [255, 255, 255, 0]]], dtype=np.uint8))
    np.testing.assert_array_equal(decode_grey(encode(rgba, "PNG")), [[90, 0]])
    np.testing.assert_array_equal(decode_grey(encode(rgba.convert("LA"), "PNG")), [[90, 0]])
    palette = Image.new("P", (2, 1))
    palette.putpalette([90, 90, 90, 255, 255, 255])
    palette.putdata([0, 1])
    np.testing.assert_array_equal(decode_grey(encode(palette, "PNG", transparency=1)), [[90, 0]])


def test_one_bit_becomes_black_and_white() -> None:
    image = Image.fromarray(np.array([[True, False]]))
    np.testing.assert_array_equal(decode_grey(encode(image, "PNG")), [[255, 0]])


def test_cmyk_jpeg_is_close_to_its_picture() -> None:
    picture = np.tile(np.linspace(0, 255, 64, dtype=np.uint8), (48, 1))
    cmyk = Image.fromarray(picture).convert("RGB").convert("CMYK")
    found = decode_grey(encode(cmyk, "JPEG", quality=95))
    assert np.abs(found.astype(int) - picture).max() < 12


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.fromarray(np.full((8, 8), value, dtype=np.uint8)) for value in (40, 200)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(decode_grey(data), np.full((8, 8), 40))


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "JPEG2000", "PNG", "TIFF", "BMP", "GIF", "WEBP", "PPM"])
def test_every_format_is_read(kind: str) -> None:
    data = encode(Image.fromarray(np.full((16, 16), 60, dtype=np.uint8)).convert("L"), kind)
    np.testing.assert_allclose(decode_grey(data).astype(int), 60, atol=2)


def bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"hello, this is text", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),
        (bomb(8000, 8000), "8000 x 8000 pixels"),
        (bomb(60000, 60000), "pixels that are decoded"),
    ],
)
def test_unusable_bytes_have_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadImageError, match=reason):
        decode_grey(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_a_file_cut_short_is_bad(grey: Callable[..., Grey], kind: str) -> None:
    data = encode(Image.fromarray(grey(3, 200, 200)), kind)
    with pytest.raises(BadImageError):
        decode_grey(data[: len(data) // 2])


def test_floats_and_32_bit_integers_are_refused() -> None:
    floats = encode(Image.fromarray(np.ones((4, 4), dtype=np.float32)), "TIFF")
    with pytest.raises(BadImageError, match="floating-point"):
        decode_grey(floats)
    wide = encode(Image.fromarray(np.full((4, 4), 70000, dtype=np.int32)), "TIFF")
    with pytest.raises(BadImageError, match="32-bit"):
        decode_grey(wide)


def test_resize_averages_instead_of_skipping(grey: Callable[..., Grey]) -> None:
    checkerboard = (np.indices((64, 128)).sum(axis=0) % 2 * 255).astype(np.uint8)
    small = resize(checkerboard, 16)
    assert small.shape == (16, 16)
    assert small.dtype == np.uint8
    assert np.abs(small[1:-1, 1:-1].astype(int) - 128).max() <= 8
    same = grey(4, 16, 16)
    np.testing.assert_array_equal(resize(same, 16), same)


def test_pixel_hash_tells_shapes_and_pixels_apart(grey: Callable[..., Grey]) -> None:
    picture = grey(5, 6, 4)
    other = picture.copy()
    other[0, 0] ^= 1
    assert pixel_hash(picture) == pixel_hash(picture.copy())
    assert len({pixel_hash(picture), pixel_hash(other), pixel_hash(picture.reshape(4, 6))}) == 3
