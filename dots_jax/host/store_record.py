"""One stored page: its bytes, then a trailer that says whose they are and proves that they are whole.

    0                          payload_nbytes                    payload_nbytes + 128
    +--------------------------+------------------------------------------------+
    | all K bytes, all V bytes | magic, algorithm, length, namespace, key,      |
    | (layer, token, head,     | digest of the payload, CRC-32 of the trailer   |
    |  width on either side)   |                                                |
    +--------------------------+------------------------------------------------+

The trailer comes last, so that a file cut short anywhere has none in its place, and reading the last 128 bytes is
enough to say that a page is there. It names namespace and key, so that an object copied to another name is not taken
for the page of that name.

Both algorithms find tears, cuts and flipped bits; neither is a defence against someone who may write to the store, as
no digest without a secret is. CRC-32 finds all damage within 32 neighbouring bits, and misses other damage once in
2**32 damaged objects.
"""

import hashlib
import struct
import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

Checksum = Literal["crc32", "sha256"]

_MAGIC = b"DOTSPAGE"
_FIELDS = struct.Struct("<8sIIQ32s32s32s4x")  # magic, format, algorithm, payload bytes, namespace, key, payload digest
_CRC = struct.Struct("<I")
TRAILER_NBYTES = _FIELDS.size + _CRC.size
_FORMAT = 1
_ALGORITHMS: dict[str, int] = {"crc32": 1, "sha256": 2}


def check_checksum(name: str) -> None:
    """Raises `ValueError` for an algorithm that does not exist."""
    if name not in _ALGORITHMS:
        raise ValueError(f"checksum: expected one of {', '.join(_ALGORITHMS)}, got {name!r}.")


def seal(sides: Sequence[np.ndarray], *, namespace: str, key: str, checksum: Checksum) -> bytes:
    """An object of one page.

    Args:
      sides: the page's bytes, K before V: contiguous uint8 arrays, which are copied once, into the result.
      namespace: digest of the geometry, 64 hexadecimal digits.
      key: the page's key.
      checksum: how to protect the payload.
    """
    payload = [memoryview(side).cast("B") for side in sides]
    algorithm = _ALGORITHMS[checksum]
    digest = _digest(payload, algorithm)
    return b"".join([*payload, _trailer(sum(part.nbytes for part in payload), namespace, key, algorithm, digest)])


def unseal(value: bytes, *, payload_nbytes: int, namespace: str, key: str) -> np.ndarray | None:
    """The page's bytes, `uint8[payload_nbytes]`, without a copy; None unless this is the page, whole and unaltered."""
    if len(value) != payload_nbytes + TRAILER_NBYTES:
        return None
    algorithm = trailer_algorithm(value[payload_nbytes:], payload_nbytes=payload_nbytes, namespace=namespace, key=key)
    if algorithm is None:
        return None
    payload = memoryview(value)[:payload_nbytes]
    stored = _FIELDS.unpack_from(value, payload_nbytes)[-1]
    return np.frombuffer(payload, np.uint8) if _digest([payload], algorithm) == stored else None


def trailer_algorithm(trailer: bytes, *, payload_nbytes: int, namespace: str, key: str) -> int | None:
    """The algorithm that a trailer names, None unless it is a whole trailer of this page."""
    if len(trailer) != TRAILER_NBYTES:
        return None
    *_, algorithm, _, _, _, digest = _FIELDS.unpack_from(trailer)
    whole = trailer == _trailer(payload_nbytes, namespace, key, algorithm, digest)
    return algorithm if whole and algorithm in _ALGORITHMS.values() else None


def _trailer(payload_nbytes: int, namespace: str, key: str, algorithm: int, digest: bytes) -> bytes:
    owner = bytes.fromhex(namespace), hashlib.sha256(key.encode()).digest()
    fields = _FIELDS.pack(_MAGIC, _FORMAT, algorithm, payload_nbytes, *owner, digest)
    return fields + _CRC.pack(zlib.crc32(fields))


def _digest(payload: Sequence[memoryview], algorithm: int) -> bytes:
    """32 bytes, padded with zeros."""
    if algorithm == _ALGORITHMS["sha256"]:
        sha = hashlib.sha256()
        for part in payload:
            sha.update(part)
        return sha.digest()
    crc = 0
    for part in payload:
        crc = zlib.crc32(part, crc)
    return _CRC.pack(crc).ljust(32, b"\0")
