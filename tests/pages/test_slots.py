import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dots_jax.pages import swa_table_from_slots

SLOTS = np.array([[8, 9, 10, 11, 20, 21, 22, 23]])


def mapping(size=25):
    """Full slots 8..11 -> 4..7 and 20..23 -> 12..15; everything else unmapped, and the last entry -1."""
    full_to_swa = np.zeros(size, np.int64)
    full_to_swa[8:12], full_to_swa[20:24], full_to_swa[-1] = range(4, 8), range(12, 16), -1
    return full_to_swa


def table(slots, lengths, full_to_swa=None):
    full_to_swa = mapping() if full_to_swa is None else full_to_swa
    return swa_table_from_slots(slots, full_to_swa, lengths, page_size=4).pages.tolist()


def test_slots_are_translated_before_the_division():
    assert table(SLOTS, [8]) == [[1, 3]]
    assert table(SLOTS[:, :6], [6]) == [[1, 3]]
    result = swa_table_from_slots(jnp.asarray(SLOTS), jnp.asarray(mapping()), jnp.array([8]), 4)
    assert (result.page_size, result.pages.dtype, result.lengths.tolist()) == (4, jnp.int32, [8])


@pytest.mark.parametrize("bad", [-1, -2, 25, 2**31 - 1, 24, 0], ids=lambda slot: f"slot {slot}")
def test_what_is_not_mapped_is_absent(bad):
    # -1 and 24 (which maps to -1) must not become page 0, nor wrap to the last entry; 25 must not be clamped to it.
    slots = SLOTS.copy()
    slots[0, 0] = bad
    assert table(slots, [8]) == [[-1, 3]]


def test_an_index_past_the_mapping_is_not_clamped_to_a_mapped_entry():
    full_to_swa = mapping()[:24]
    assert table([[24, 0, 0, 0, -1, 0, 0, 0]], [8], full_to_swa) == [[-1, -1]]
    assert table(SLOTS, [8], np.zeros(0, np.int32)) == [[-1, -1]]


@pytest.mark.parametrize(("length", "expected"), [(8, [1, 3]), (5, [1, 3]), (4, [1, -1]), (1, [1, -1]), (0, [-1, -1])])
def test_columns_past_the_length_are_absent_whatever_slots_are_left_there(length, expected):
    assert table(SLOTS, [length]) == [expected]


def test_only_the_first_token_of_a_page_decides():
    full_to_swa = mapping()
    full_to_swa[[9, 10, 11]] = 0
    assert table(SLOTS, [8], full_to_swa) == [[1, 3]]
    full_to_swa[8] = 0
    assert table(SLOTS, [8], full_to_swa) == [[-1, 3]]


def test_it_is_jitable_and_checks_shapes():
    jitted = jax.jit(swa_table_from_slots, static_argnames="page_size")
    assert jitted(SLOTS, jnp.asarray(mapping()), jnp.array([8]), page_size=4).pages.tolist() == [[1, 3]]
    with pytest.raises(ValueError, match=r"slots must have shape \[rows, tokens\], got \(8,\)"):
        swa_table_from_slots(SLOTS[0], mapping(), [8], 4)
    with pytest.raises(ValueError, match=r"full_to_swa must have shape \[slots\]"):
        swa_table_from_slots(SLOTS, mapping()[None], [8], 4)
    with pytest.raises(ValueError, match=r"lengths .* expected shape \(1,\), got \(2,\)"):
        swa_table_from_slots(SLOTS, mapping(), [8, 8], 4)
    with pytest.raises(ValueError, match="power of two, got 3"):
        swa_table_from_slots(SLOTS, mapping(), [8], 3)
    with pytest.raises(TypeError, match="slots must have an integer dtype"):
        swa_table_from_slots(SLOTS.astype(np.float32), mapping(), [8], 4)
