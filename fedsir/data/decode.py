"""One image file's bytes to 8-bit grey, and grey images to the size that the network sees.

Pure functions of bytes. Nothing is decoded at reduced size (JPEG `draft`): its pixels are others than those of a
full picture that is resized, which every other format gives.
"""

from __future__ import annotations

import hashlib
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError, features
from PIL import __version__ as pillow_version

# Raise when the same bytes and size would give other pixels than before: it is part of every cache key.
ALGORITHM = 1

# Only formats that Pillow decodes itself: its EPS reader, for one, starts another program.
FORMATS = ("JPEG", "JPEG2000", "PNG", "TIFF", "BMP", "GIF", "WEBP", "PPM")

# Registers the readers of all formats; `Image.open` does so lazily only where it may try every format.
Image.init()

# A B-scan has about one million pixels; a file that claims more than this is damaged or hostile.
MAX_PIXELS = 50_000_000


class BadImageError(Exception):
    """A file that holds no usable picture; the text is the reason, in a few words."""


def algorithm() -> str:
    """Everything besides bytes and size that determines pixels: this module and the decoders in use."""
    return f"{ALGORITHM}/pillow {pillow_version}/jpeg {features.version('jpg')}"


def decode_grey(data: bytes) -> NDArray[np.uint8]:
    """`grey_picture` as (H, W) uint8."""
    return np.array(grey_picture(data))


def grey_picture(data: bytes) -> Image.Image:
    """The picture in `data` in 8-bit grey (mode L); the first frame where there are several.

    Colour becomes ITU-R 601 luma, so a grey picture stored as RGB gives its grey values exactly. Transparency
    is laid over black, the background of a B-scan. 16-bit values are scaled by the full range (65535 becomes
    255), never by the picture's own range, which would make pictures incomparable. Raises `BadImageError`.
    """
    if not data:
        raise BadImageError("empty file")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadImageError(f"{width} x {height} pixels, more than the {MAX_PIXELS:,} that are decoded")
            image.load()
            return _to_grey(image)
    except (BadImageError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadImageError("not an image, or a format other than JPEG, PNG, TIFF, BMP, GIF, WebP, PPM") from None
    except Image.DecompressionBombError:
        raise BadImageError(f"more than the {MAX_PIXELS:,} pixels that are decoded") from None
    except Exception as error:  # readers of damaged files raise about anything: SyntaxError, struct.error, ...
        raise BadImageError(" ".join(str(error).split()) or type(error).__name__) from error


def _to_grey(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray(_from_16_bit(np.asarray(image)))
    if image.mode == "F":
        raise BadImageError("floating-point pixels; convert to 8 or 16 bits")
    if image.has_transparency_data:
        colour = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), colour).convert("RGB")
    elif image.mode not in ("1", "L", "RGB"):
        image = image.convert("RGB")
    # The end of the file's context closes the file alone; pixels that have been loaded stay.
    return image if image.mode == "L" else image.convert("L")


def _from_16_bit(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    # Older Pillow releases read 16-bit PNG as 32-bit integers, so the mode alone does not tell the range.
    if values.min() < 0 or values.max() > 65535:
        raise BadImageError("32-bit pixels; convert to 8 or 16 bits")
    # 255 times 65535 fits into 32 bits; in place, because pictures of 50 million pixels are decoded side by side.
    scaled = values.astype(np.uint32)
    scaled *= 255
    scaled += 32767
    scaled //= 65535
    return scaled.astype(np.uint8)


def resize(image: NDArray[np.uint8] | Image.Image, size: int) -> NDArray[np.uint8]:
    """(H, W) or a grey picture to (size, size) uint8, bilinear with antialiasing; the aspect ratio is not kept."""
    if isinstance(image, np.ndarray):
        if image.shape == (size, size):
            return image
        image = Image.fromarray(np.ascontiguousarray(image))
    return np.array(image.resize((size, size), Image.Resampling.BILINEAR))


def pixel_hash(image: NDArray[np.uint8], *full_size: int) -> bytes:
    """32 bytes, equal exactly where two (H, W) grey images have the same shape and pixels, and `full_size`."""
    digest = hashlib.sha256(np.array([*image.shape, *full_size], dtype="<i8").tobytes())
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()
