"""The column-split body, simulated with race detection, against the float32 definition."""

import decode_cases
import pytest
from decode_cases import ADVERSARIAL, Case, check

from pallas_kernels.swa_latent_decode import Config

# The simulated products meet the poison of keys that are masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")


@pytest.mark.parametrize("case", ADVERSARIAL, ids=lambda case: case.name)
def test_adversarial(case):
    check(case, Config("column_split"))


def test_released_geometry():
    check(Case("released", (600,), heads=64, width=1088, v_dim=1024, window=513), Config("column_split"))


def test_default_geometry_with_splits():
    case = Case("default", (150,), seq=4, heads=24, width=576, v_dim=512, window=None, table_width=3)
    check(case, Config("column_split", stages=4, splits=2))


def test_two_runs_are_bit_identical():
    case = Case("twice", (200, 66), seq=2, heads=8)
    first, second = (decode_cases.run(case, Config("column_split")) for _ in range(2))
    assert (first[0].tobytes(), first[1].tobytes()) == (second[0].tobytes(), second[1].tobytes())
