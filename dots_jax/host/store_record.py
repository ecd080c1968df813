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

Digests of the payload, none of which defends against someone who may write to the store (no digest without a secret
does); what they have to find is tears, cuts and flipped bits:

- `xxh3`: XXH3 of 128 bits, from the xxhash package: misses damage once in 2**128, at the speed of memory.
- `sha256`: for stores where a digest of cryptographic strength is wanted, ten times slower.
"""

import hashlib
import itertools
import struct
import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import xxhash

Checksum = Literal["xxh3", "sha256"]

_MAGIC = b"DOTSPAGE"
_FIELDS = struct.Struct("<8sIIQ32s32s32s4x")  # magic, format, algorithm, payload bytes, namespace, key, payload digest
_CRC = struct.Struct("<I")
TRAILER_NBYTES = _FIELDS.size + _CRC.size
_FORMAT = 1
_ALGORITHMS: dict[str, int] = {"xxh3": 1, "sha256": 2}


def check_checksum(name: str) -> None:
    """Raises `ValueError` for an algorithm that does not exist."""
    if name not in _ALGORITHMS:
        raise ValueError(f"checksum: expected one of {', '.join(_ALGORITHMS)}, got {name!r}.")


def seal(memory: bytearray, sides_nbytes: Sequence[int], *, namespace: str, key: str, checksum: Checksum) -> None:
    """Makes an object of the page whose bytes are in `memory` already.

    Args:
      memory: the page's bytes, K before V, and `TRAILER_NBYTES` more, which are written.
      sides_nbytes: bytes of each side.
      namespace: digest of the geometry, 64 hexadecimal digits.
      key: the page's key.
      checksum: how to protect the payload.
    """
    payload_nbytes, algorithm = sum(sides_nbytes), _ALGORITHMS[checksum]
    digest = _digest(_split(memory, sides_nbytes), algorithm)
    memory[payload_nbytes:] = _trailer(payload_nbytes, namespace, key, algorithm, digest)


def unseal(value: bytes | memoryview, *, sides_nbytes: Sequence[int], namespace: str, key: str) -> np.ndarray | None:
    """The page's bytes as a view of `value`, uint8; None unless this is the page, whole and unaltered."""
    payload_nbytes = sum(sides_nbytes)
    if len(value) != payload_nbytes + TRAILER_NBYTES:
        return None
    algorithm = trailer_algorithm(
        bytes(value[payload_nbytes:]), payload_nbytes=payload_nbytes, namespace=namespace, key=key
    )
    if algorithm is None:
        return None
    stored = _FIELDS.unpack_from(value, payload_nbytes)[-1]
    whole = _digest(_split(value, sides_nbytes), algorithm) == stored
    return np.frombuffer(value, np.uint8, payload_nbytes) if whole else None


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


def _split(value: bytes | bytearray | memoryview, sides_nbytes: Sequence[int]) -> list[memoryview]:
    ends = list(itertools.accumulate(sides_nbytes))
    return [memoryview(value)[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _digest(payload: Sequence[memoryview], algorithm: int) -> bytes:
    """32 bytes, padded with zeros."""
    state = xxhash.xxh3_128() if algorithm == _ALGORITHMS["xxh3"] else hashlib.sha256()
    for part in payload:
        state.update(part)
    return state.digest().ljust(32, b"\0")
