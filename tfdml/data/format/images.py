"""Checks whether TensorFlow decodes an image file correctly, and converts image files."""

import io
import warnings

from tfdml.data import optional
from tfdml.data.format.image_options import ImageOptions

Image = optional.load("PIL.Image", "Reading images")
ImageOps = optional.load("PIL.ImageOps", "Reading images")

# Formats that TensorFlow decodes.
FORMATS = ("JPEG", "PNG", "GIF", "BMP")
# About 13,000 x 13,000: a file of a few kilobytes can claim any size.
LARGEST_PIXELS = 178_956_970
_ORIENTATION = 0x0112
# Modes that TensorFlow decodes faithfully.
_PLAIN = ("L", "RGB", "P", "1")
FIX = "Convert it with --fix-images, which makes upright 8-bit RGB of the first frame"


def prepare(data: bytes, options: ImageOptions) -> bytes:
    """Returns the bytes to store for an image file.

    The whole file is decoded, so that truncation is found. A JPEG is decoded at an eighth of its
    size, which also reads all of its bytes.

    Args:
        data: Content of the file.
        options: Processing of the image.

    Raises:
        ValueError: If the image is damaged or too large, or TensorFlow would decode it wrongly.
    """
    if not data:
        raise ValueError("is an empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                return _prepare(image, data, options)
    except Image.UnidentifiedImageError as error:
        raise ValueError("is not an image, whatever its name says") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"has too many pixels: {error}") from error
    except (OSError, SyntaxError, EOFError, IndexError, OverflowError) as error:
        raise ValueError(f"is damaged: {error}") from error


def _prepare(image: Image.Image, data: bytes, options: ImageOptions) -> bytes:
    if image.width * image.height > LARGEST_PIXELS:
        raise ValueError(f"has too many pixels: {image.width} x {image.height}")
    trouble = _trouble(image)
    if trouble and not options.fix:
        raise ValueError(f"{trouble}. {FIX}")
    if not trouble and options.resize is None and options.format is None:
        if image.format == "JPEG":
            image.draft(image.mode, (max(1, image.width // 8), max(1, image.height // 8)))
        image.load()
        return data
    return _encoded(_plain(image) if trouble or options.fix else image, options, image.format)


def _trouble(image: Image.Image) -> str:
    """Returns why TensorFlow would decode an image wrongly or not at all; empty if it would not."""
    if image.format not in FORMATS:
        return f"is {image.format}, which TensorFlow does not decode"
    if getattr(image, "n_frames", 1) > 1:
        return f"is animated, of {image.n_frames} frames"
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        return "is transparent: its alpha channel would be dropped"
    if image.mode not in _PLAIN:
        return f"is in mode {image.mode}, not 8-bit grey or RGB"
    if image.getexif().get(_ORIENTATION, 1) != 1:
        return "is rotated by its EXIF orientation, which TensorFlow does not look at"
    return ""


def _plain(image: Image.Image) -> Image.Image:
    """Returns the first frame, upright, in 8 bits, with white behind transparent parts."""
    image.seek(0)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        # Keeps the upper 8 of 16 bits.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(background, image)
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _encoded(image: Image.Image, options: ImageOptions, source_format: str | None) -> bytes:
    form = (options.format or ("jpeg" if source_format in ("JPEG", "WEBP") else "png")).upper()
    if image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    if options.resize is not None:
        height, width = options.resize
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    image.save(stream, form, **({"quality": options.quality} if form == "JPEG" else {}))
    return stream.getvalue()
