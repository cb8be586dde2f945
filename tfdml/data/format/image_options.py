"""Options for images that become records, and the extensions of image files."""

import dataclasses

# Extensions of image files.
EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".gif", ".bmp"),
    *(".webp", ".tif", ".tiff", ".ppm", ".pgm"),
)


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    """Processing of images; by default their bytes are kept.

    Attributes:
        resize: Height and width; the aspect ratio is not preserved.
        format: "jpeg" or "png" to encode images again in that format.
        quality: JPEG quality, from 1 to 100.
        fix: Whether images that TensorFlow would decode wrongly are converted, not refused.
    """

    resize: tuple[int, int] | None = None
    format: str | None = None
    quality: int = 95
    fix: bool = False

    def __post_init__(self) -> None:
        if self.format not in (None, "jpeg", "png"):
            raise ValueError(f'`format` must be "jpeg" or "png". Received: {self.format!r}.')
        if not 1 <= self.quality <= 100:
            raise ValueError(f"`quality` must be from 1 to 100. Received: {self.quality}.")
        if self.resize is not None and min(self.resize) < 1:
            raise ValueError(f"`resize` must be a height and a width. Received: {self.resize}.")
