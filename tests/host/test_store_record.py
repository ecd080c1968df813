"""Objects: what is sealed comes back, and nothing else ever does."""

import hashlib
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dots_jax.host.store_record import TRAILER_NBYTES, check_checksum, seal, trailer_algorithm, unseal

NAMESPACE = hashlib.sha256(b"namespace").hexdigest()
SIDES = [np.arange(100, dtype=np.uint8), np.arange(50, 110, dtype=np.uint8)]
PAYLOAD = np.concatenate(SIDES).tobytes()
OWNER = {"payload_nbytes": 160, "namespace": NAMESPACE, "key": "a"}


@pytest.fixture(params=["crc32", "sha256"])
def value(request):
    return seal(SIDES, namespace=NAMESPACE, key="a", checksum=request.param)


def opened(value, **change):
    payload = unseal(value, **(OWNER | change))
    return None if payload is None else payload.tobytes()


def test_a_page_comes_back(value):
    assert len(value) == 160 + TRAILER_NBYTES == 160 + 128
    assert value[:160] == PAYLOAD
    assert opened(value) == PAYLOAD


def test_the_digest_is_the_standard_one():
    assert zlib.crc32(PAYLOAD).to_bytes(4, "little") in seal(SIDES, namespace=NAMESPACE, key="a", checksum="crc32")
    assert hashlib.sha256(PAYLOAD).digest() in seal(SIDES, namespace=NAMESPACE, key="a", checksum="sha256")


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


@pytest.mark.parametrize(
    "change", [{"key": "b"}, {"namespace": hashlib.sha256(b"other").hexdigest()}, {"payload_nbytes": 159}]
)
def test_another_page_is_not_taken_for_it(value, change):
    assert opened(value, **change) is None
    assert trailer_algorithm(value[-TRAILER_NBYTES:], **(OWNER | change)) is None


def test_the_trailer_alone_shows_that_a_page_is_there(value):
    assert trailer_algorithm(value[-TRAILER_NBYTES:], **OWNER) in (1, 2)
    for place in range(1, TRAILER_NBYTES + 1):
        damaged = bytearray(value)
        damaged[-place] ^= 64
        assert trailer_algorithm(bytes(damaged[-TRAILER_NBYTES:]), **OWNER) is None
    assert trailer_algorithm(b"", **OWNER) is None


def test_a_digest_of_the_other_algorithm_does_not_pass():
    """A trailer that names SHA-256 over a CRC digest, made with a matching trailer checksum."""
    good = seal(SIDES, namespace=NAMESPACE, key="a", checksum="crc32")
    fields = bytearray(good[160:-4])
    assert fields[12:16] == (1).to_bytes(4, "little")
    for algorithm in (2, 3, 0):
        fields[12:16] = algorithm.to_bytes(4, "little")
        assert opened(good[:160] + bytes(fields) + zlib.crc32(fields).to_bytes(4, "little")) is None


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_no_page(data):
    assert opened(data) is None


def test_unknown_checksums_are_refused():
    with pytest.raises(ValueError, match="checksum: expected one of crc32, sha256, got 'md5'"):
        check_checksum("md5")
