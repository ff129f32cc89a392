"""The headers of NRRD and MetaImage files: their voxels' place and number, and the unit of lengths.

SimpleITK reads the voxels. It ignores what follows them, reads a MetaImage whose compressed voxels
are damaged as if they were whole, and takes all lengths as millimetres. `check_voxels` and
`stated_unit` are for these three.
"""

import gzip
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from collegium.data.decoded_image import listed
from collegium.errors import DataError

_CHUNK = 1 << 20  # bytes that are held at a time

_NRRD_BYTES = {
    ("char", "int8"): 1,
    ("short", "int16"): 2,
    ("long long", "longlong", "int64", "double"): 8,
    ("int", "float"): 4,
}
"""Bytes per value by words of an NRRD's type; the first that occurs counts, as in "uint8_t"."""

_META_BYTES = {
    "CHAR": 1, "UCHAR": 1, "SHORT": 2, "USHORT": 2, "INT": 4, "UINT": 4, "LONG": 4, "ULONG": 4,
    "LONG_LONG": 8, "ULONG_LONG": 8, "FLOAT": 4, "DOUBLE": 8,
}  # fmt: skip
"""Bytes per value by an element type without its MET_."""


_MM = {
    1.0: ("", "?", "???", "mm", "millimeter", "millimeters", "millimetre", "millimetres"),
    0.001: ("um", "\u03bcm", r"\xb5m", "micron", "microns", "micrometer", "micrometers",
            "micrometre", "micrometres"),
    10.0: ("cm", "centimeter", "centimeters", "centimetre", "centimetres"),
    1000.0: ("m", "meter", "meters", "metre", "metres"),
}  # fmt: skip
"""Millimetres per unit of length, and its names in lower case."""


@dataclass(frozen=True)
class StoredVoxels:
    """The place and the number of the stored voxels of a volume.

    Attributes:
        file: The file that holds them.
        start: The number of bytes before them on disk.
        skipped: The number of decoded bytes before them.
        encoding: How they are stored: "raw", "gzip" or "zlib".
        size: The number of bytes that the header's size and type need.
    """

    file: Path
    start: int
    skipped: int
    encoding: str
    size: int


def stated_unit(path: Path) -> tuple[float, str]:
    """Return the millimetres per unit of length of an NRRD or MetaImage, and the unit's name.

    It is `space units` (or `units`) of NRRD and `DistanceUnits` of MetaImage; without one, lengths
    are millimetres.

    Args:
        path: The file with the header.

    Raises:
        DataError: The unit is unknown, or the axes have several.
    """
    nrrd = path.suffix.lower() in (".nrrd", ".nhdr")
    with path.open("rb") as file:
        fields = _nrrd_fields(file) if nrrd else _meta_fields(file)
    if nrrd:
        stated = re.findall(r'"([^"]*)"', fields.get("space units", fields.get("units", "")))
    else:
        stated = [fields.get("DistanceUnits", "")]
    units = {unit.strip().casefold() for unit in stated} or {""}
    known = {factor for factor, names in _MM.items() if units & {*names}}
    if len(known) != 1 or not units <= {name for names in _MM.values() for name in names}:
        raise DataError(
            f"{path}: states its lengths in {listed(stated)}: export it in millimetres (mm)"
        )
    return known.pop(), stated[0] if stated else ""


def check_voxels(path: Path) -> None:
    """Read the voxels of an NRRD or MetaImage to their end, and compare them with the header.

    Voxels that are written as text, are spread over several files or stand at the end of a file
    with other content are not checked.

    Args:
        path: The file with the header.

    Raises:
        ValueError: There are more or fewer than the header says, or a checksum does not agree.
    """
    nrrd = path.suffix.lower() in (".nrrd", ".nhdr")
    voxels = _nrrd_voxels(path) if nrrd else _meta_voxels(path)
    if voxels is None:
        return
    with voxels.file.open("rb") as file:
        file.seek(voxels.start)
        try:
            found = sum(_decoded_sizes(file, voxels.encoding)) - voxels.skipped
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"its compressed voxels are damaged: {error}") from error
    if found != voxels.size:
        raise ValueError(
            f"it holds {found} bytes of voxels, and its header's size needs {voxels.size}"
        )


def _decoded_sizes(file: BinaryIO, encoding: str) -> Iterator[int]:
    """Yield the sizes of the decoded pieces of a file from its position to its end."""
    if encoding == "raw":
        yield os.fstat(file.fileno()).st_size - file.tell()
    elif encoding == "gzip":
        with gzip.GzipFile(fileobj=file) as stream:
            while piece := stream.read(_CHUNK):
                yield len(piece)
    else:
        inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)  # of zlib or gzip, as MetaIO reads them
        while piece := file.read(_CHUNK):
            yield len(inflate.decompress(piece)) + len(inflate.unused_data)
        if not inflate.eof:
            raise EOFError("they end before the end of the stream")


def _nrrd_voxels(path: Path) -> StoredVoxels | None:
    with path.open("rb") as file:
        fields = _nrrd_fields(file)
        start = file.tell()
    name = fields.get("data file", fields.get("datafile", ""))
    encoding = {"raw": "raw", "gzip": "gzip", "gz": "gzip"}.get(fields.get("encoding", "").lower())
    skipped = int(fields.get("byte skip", fields.get("byteskip", "0")))
    lines = int(fields.get("line skip", fields.get("lineskip", "0")))
    of_type = fields.get("type", "")
    size = next((n for words, n in _NRRD_BYTES.items() if any(w in of_type for w in words)), 0)
    if encoding is None or not size or skipped < 0 or lines or name == "LIST" or "%" in name:
        return None
    count = math.prod(map(int, fields["sizes"].split()))
    there = path.parent / name if name else path
    return StoredVoxels(there, 0 if name else start, skipped, encoding, size * count)


def _nrrd_fields(file: BinaryIO) -> dict[str, str]:
    """Read the fields of a header by their names in lower case, up to the empty line."""
    fields: dict[str, str] = {}
    for line in file:
        text = line.decode("utf-8", "backslashreplace").strip()
        if not text:
            break
        key, colon, value = text.partition(": ")
        if colon and not text.startswith("#"):
            fields[key.lower()] = value.strip()
    return fields


def _meta_voxels(path: Path) -> StoredVoxels | None:
    with path.open("rb") as file:
        fields = _meta_fields(file)
        start = file.tell()
    name = fields.get("ElementDataFile", "")
    of_type = fields.get("ElementType", "").removeprefix("MET_").removesuffix("_ARRAY")
    local, skipped = name.upper() == "LOCAL", int(fields.get("HeaderSize", "0"))
    several = name.upper().startswith("LIST") or "%" in name
    written = _is_true(fields, "BinaryData", "True")
    if of_type not in _META_BYTES or several or skipped < 0 or not written:
        return None
    channels = int(fields.get("ElementNumberOfChannels", "1"))
    count = math.prod(map(int, fields["DimSize"].split())) * channels
    return StoredVoxels(
        path if local else path.parent / name,
        start if local else skipped,
        0,
        "zlib" if _is_true(fields, "CompressedData", "False") else "raw",
        _META_BYTES[of_type] * count,
    )


def _meta_fields(file: BinaryIO) -> dict[str, str]:
    """Read the fields of a header, up to the one after which the voxels may begin."""
    fields: dict[str, str] = {}
    for line in file:
        key, equals, value = line.decode("utf-8", "backslashreplace").partition("=")
        if equals:
            fields[key.strip()] = value.strip()
        if key.strip() == "ElementDataFile":
            break
    return fields


def _is_true(fields: Mapping[str, str], key: str, usual: str) -> bool:
    return fields.get(key, usual).lower() in ("true", "1", "t")
