"""Objects: what is sealed comes back, and nothing else ever does."""

import hashlib
import zlib

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dots_jax.host.store_record import TRAILER_NBYTES, check_checksum, seal, trailer_algorithm, unseal

NAMESPACE = hashlib.sha256(b"namespace").hexdigest()
SIDES = [np.arange(100, dtype=np.uint8), np.arange(50, 110, dtype=np.uint8)]
PAYLOAD = np.concatenate(SIDES).tobytes()
OWNER = {"namespace": NAMESPACE, "key": "a"}


def sealed(sides, checksum):
    """An object of key "a"."""
    memory = bytearray(b"".join(side.tobytes() for side in sides) + bytes(TRAILER_NBYTES))
    seal(memory, [side.size for side in sides], namespace=NAMESPACE, key="a", checksum=checksum)
    return bytes(memory)


@pytest.fixture(params=["xxh3", "sha256"])
def value(request):
    return sealed(SIDES, request.param)


def opened(value, sides_nbytes=(100, 60), **change):
    payload = unseal(value, sides_nbytes=sides_nbytes, **(OWNER | change))
    return None if payload is None else payload.tobytes()


def test_a_page_comes_back(value):
    assert len(value) == 160 + TRAILER_NBYTES == 160 + 128
    assert value[:160] == PAYLOAD
    assert opened(value) == PAYLOAD


def test_the_digest_is_the_standard_one():
    assert xxhash.xxh3_128_digest(PAYLOAD) in sealed(SIDES, "xxh3")
    assert hashlib.sha256(PAYLOAD).digest() in sealed(SIDES, "sha256")


def test_every_flipped_bit_is_noticed(value):
    for place in range(len(value)):
        for bit in range(8):
            damaged = bytearray(value)
            damaged[place] ^= 1 << bit
            assert opened(bytes(damaged)) is None, f"byte {place} bit {bit}"


def test_every_cut_is_noticed(value):
    for length in range(len(value)):
        assert opened(value[:length]) is None
        assert opened(value[:length] + bytes(len(value) - length)) is None or value[length:].strip(b"\0") == b""
    assert opened(value + b"\0") is None
    assert opened(value[1:]) is None


OTHER = hashlib.sha256(b"other").hexdigest()


@pytest.mark.parametrize(
    ("change", "sides"), [({"key": "b"}, (100, 60)), ({"namespace": OTHER}, (100, 60)), ({}, (9, 7))]
)
def test_another_page_is_not_taken_for_it(value, change, sides):
    assert opened(value, sides, **change) is None
    trailer = value[-TRAILER_NBYTES:]
    assert trailer_algorithm(trailer, payload_nbytes=sum(sides), **(OWNER | change)) is None


def test_the_trailer_alone_shows_that_a_page_is_there(value):
    assert trailer_algorithm(value[-TRAILER_NBYTES:], payload_nbytes=160, **OWNER) in (1, 2)
    for place in range(1, TRAILER_NBYTES + 1):
        damaged = bytearray(value)
        damaged[-place] ^= 64
        assert trailer_algorithm(bytes(damaged[-TRAILER_NBYTES:]), payload_nbytes=160, **OWNER) is None
    assert trailer_algorithm(b"", payload_nbytes=160, **OWNER) is None


def test_a_digest_of_the_other_algorithm_does_not_pass():
    """A trailer that names SHA-256 over an XXH3 digest, made with a matching trailer checksum."""
    good = sealed(SIDES, "xxh3")
    fields = bytearray(good[160:-4])
    assert fields[12:16] == (1).to_bytes(4, "little")
    for algorithm in (2, 3, 0):
        fields[12:16] = algorithm.to_bytes(4, "little")
        assert opened(good[:160] + bytes(fields) + zlib.crc32(fields).to_bytes(4, "little")) is None


@pytest.mark.parametrize("checksum", ["xxh3", "sha256"])
def test_damage_of_every_kind_and_size_is_noticed(checksum):
    """Zeroed, repeated, exchanged and foreign stretches, from one word to many sectors."""
    rng = np.random.default_rng(0)
    data, other = rng.integers(0, 256, (2, 5 * 4096 + 100), np.uint8)
    value = sealed([data], checksum)
    assert unseal(value, sides_nbytes=[data.size], **OWNER) is not None
    for size in (8, 512, 4096, 8192):
        for start in (0, 8, 4096, data.size - 2 * size):
            stretch, after = slice(start, start + size), slice(start + size, start + 2 * size)
            for new in (np.zeros(size, np.uint8), other[stretch], data[after], data[stretch][::-1], data[stretch] + 1):
                damaged = bytearray(value)
                damaged[stretch] = new.tobytes()
                assert unseal(bytes(damaged), sides_nbytes=[data.size], **OWNER) is None
            damaged = bytearray(value)
            damaged[stretch], damaged[after] = damaged[after], damaged[stretch]
            assert unseal(bytes(damaged), sides_nbytes=[data.size], **OWNER) is None


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_no_page(data):
    assert opened(data) is None


def test_unknown_checksums_are_refused():
    with pytest.raises(ValueError, match="checksum: expected one of xxh3, sha256, got 'md5'"):
        check_checksum("md5")
