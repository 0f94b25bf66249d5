"""The file format of a cache entry, which `cache` describes, and digests for its key."""

from __future__ import annotations

import hashlib
import struct

_MAGIC = b"ferrule\n"
_SCHEMA = 1
HEADER = struct.Struct(">8sIIQ32s")


class Entry:
    """One entry of a cache.

    Attributes:
        key: the key that it was put under.
        size: bytes on disk.
        last_use: seconds since the epoch, exact to a minute.
    """

    def __init__(self, key: str, size: int, last_use: float) -> None:
        self.key, self.size, self.last_use = key, size, last_use


def digest(*parts: str | bytes) -> str:
    """The SHA-256 of `parts` in hexadecimal: different lists of parts, different digests."""
    sha = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        kind = b"b" if isinstance(part, bytes) else b"s"
        sha.update(kind + len(data).to_bytes(8, "big") + data)
    return sha.hexdigest()


def _checksum(header: bytes, key: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    sha = hashlib.sha256(header)
    sha.update(key)
    sha.update(payload)
    return sha.digest()


def pack(key: str, payload: bytes) -> bytes:
    name = key.encode("utf-8", "surrogatepass")
    blank = HEADER.pack(_MAGIC, _SCHEMA, len(name), len(payload), bytes(32))
    checksum = _checksum(blank, name, payload)
    header = HEADER.pack(_MAGIC, _SCHEMA, len(name), len(payload), checksum)
    return b"".join((header, name, payload))


def unpack(key: str, data: bytes) -> bytes | None:
    """The payload, or None where the data are not a whole entry of `key`."""
    if len(data) < HEADER.size:
        return None
    magic, schema, key_length, length, checksum = HEADER.unpack_from(data)
    start = HEADER.size + key_length
    if magic != _MAGIC or schema != _SCHEMA or len(data) != start + length:
        return None
    view = memoryview(data)
    blank = HEADER.pack(magic, schema, key_length, length, bytes(32))
    if _checksum(blank, view[HEADER.size : start], view[start:]) != checksum:
        return None
    if view[HEADER.size : start] != key.encode("utf-8", "surrogatepass"):
        return None
    return data[start:]


def key_length(header: bytes) -> int | None:
    """The length of the key behind a header, or None where it is no entry's."""
    if len(header) < HEADER.size:
        return None
    magic, schema, length, _, _ = HEADER.unpack(header)
    return int(length) if magic == _MAGIC and schema == _SCHEMA else None
