"""Whether the file of a picture is whole: its checksums, its end, and its size against its pixels.

PNG has a checksum in every part. TIFF has none, so that only a file that is cut short, and a size
that disagrees with the stored pixels, can be noticed. The other kinds are left to their decoders,
which refuse a picture that is cut short.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""The number of samples of a PNG's pixel by its type of colour."""

_PASSES = ((0, 8, 0, 8), (4, 8, 0, 8), (0, 4, 4, 8), (2, 4, 0, 4), (0, 2, 2, 4), (1, 2, 0, 2),
           (0, 1, 1, 2))  # fmt: skip
"""First column, step of columns, first row and step of rows of the passes of an interlaced PNG."""

_BITS, _COMPRESSION, _PLANAR = 258, 259, 284
_OFFSETS, _ROWS_PER_STRIP, _BYTE_COUNTS = 273, 278, 279
"""Tags of a TIFF."""


def check_picture(image: "Image", path: Path) -> None:
    """Check that the file of a picture is whole.

    Args:
        image: The picture as Pillow opened it.
        path: Its file.

    Raises:
        ValueError: It is damaged or cut short.
    """
    if image.format == "PNG":
        _check_png(path.read_bytes())
    elif image.format == "TIFF":
        _check_tiff(image, path.stat().st_size)


def _check_png(content: bytes) -> None:
    """Compare the checksum of every part, and the number of bytes of all rows."""
    parts = [*_png_parts(content)]
    columns, rows, bits, colour, _, _, interlaced = struct.unpack(">IIBBBBB", parts[0][1])
    stored = len(zlib.decompress(b"".join(data for kind, data in parts if kind == b"IDAT")))
    needed = 0
    for left, step, top, jump in _PASSES if interlaced else ((0, 1, 0, 1),):
        wide, high = -(-(columns - left) // step), -(-(rows - top) // jump)
        if wide > 0 and high > 0:
            needed += high * (1 + -(-wide * bits * _SAMPLES[colour] // 8))
    if stored != needed:
        raise ValueError(f"it holds {stored} bytes of pixels, and its header's size needs {needed}")


def _png_parts(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the content of every part up to the last."""
    place, kind = 8, b""
    while kind != b"IEND":
        head = content[place : place + 8]
        length, kind = struct.unpack(">I4s", head) if len(head) == 8 else (0, b"")
        if len(content) < place + 12 + length:
            raise ValueError("it ends before its last part")
        data = content[place + 8 : place + 8 + length]
        (stated,) = struct.unpack_from(">I", content, place + 8 + length)
        if zlib.crc32(data, zlib.crc32(kind)) != stated:
            raise ValueError(f"the checksum of its part {kind.decode('latin-1')!r} does not agree")
        yield kind, data
        place += 12 + length


def _check_tiff(image: "Image", size: int) -> None:
    """Check that all strips are inside the file, and that rows and strips agree."""
    tags = getattr(image, "tag_v2", {})
    offsets, counts = tags.get(_OFFSETS, ()), tags.get(_BYTE_COUNTS, ())
    if not offsets or len(offsets) != len(counts):
        return
    if max(start + count for start, count in zip(offsets, counts, strict=True)) > size:
        raise ValueError("it ends before its last strip")
    bits = tags.get(_BITS, (1,))
    planes = len(bits) if tags.get(_PLANAR, 1) == 2 else 1
    strips = planes * -(-image.height // min(tags.get(_ROWS_PER_STRIP, image.height), image.height))
    if len(offsets) != strips:
        raise ValueError(f"it holds {len(offsets)} strips, and its header's size needs {strips}")
    row = -(-image.width * sum(bits) // planes // 8)
    stored, needed = sum(counts), planes * image.height * row
    if tags.get(_COMPRESSION, 1) == 1 and stored >= needed + row:
        raise ValueError(f"it holds {stored} bytes of pixels, and its header's size needs {needed}")
