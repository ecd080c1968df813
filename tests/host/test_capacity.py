"""Capacities against the figures of the upstream engine, and the limits that must hold."""

from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dots_jax.host import host_memory_budget
from dots_jax.host.capacity import (
    PoolDemand,
    pages_for_tokens,
    pages_from_bytes,
    pages_from_ratio,
    share_budget,
)


class Geometry(NamedTuple):
    bytes_per_token: int
    page_size: int = 64


FULL, SWA = Geometry(23_040), Geometry(199_680)  # the two pools of MiMo-V2-Flash


@pytest.mark.parametrize(
    ("device", "ratio", "page", "slots"), [(100, 3, 16, 304), (160, 2, 16, 336), (7, 1.5, 4, 12), (1, 0.25, 64, 64)]
)
def test_a_ratio_rounds_up_by_a_whole_page(device, ratio, page, slots):
    assert pages_from_ratio(device, ratio, page) * page == slots


def test_ten_gigabytes_of_the_global_pool():
    pages = pages_from_bytes(10e9, FULL)
    assert pages == 6782
    assert pages * 64 == 434_048
    assert pages * 64 * FULL.bytes_per_token == 10_000_465_920
    assert pages_from_bytes(10e9, FULL, rounding="down") == 6781


def test_less_than_a_token_is_one_page_or_a_refusal():
    assert pages_from_bytes(1, FULL) == 1
    with pytest.raises(ValueError, match="One page takes 1474560 bytes, more than the 1474559 bytes given"):
        pages_from_bytes(1_474_559, FULL, rounding="down")
    assert pages_from_bytes(1_474_560, FULL, rounding="down") == 1


def test_the_pools_of_one_of_four_ranks():
    reserve, gib = 10 * 2**30, 2**30
    budget = host_memory_budget(available=reserve + 64 * gib, reserve=reserve, ranks_on_host=4)
    assert budget == 16 * gib
    pages = share_budget(budget, {"full": PoolDemand(FULL, 64_000), "swa": PoolDemand(SWA, 6_400)})
    spent = 64 * (pages["full"] * FULL.bytes_per_token + pages["swa"] * SWA.bytes_per_token)
    assert budget - 64 * (FULL.bytes_per_token + SWA.bytes_per_token) < spent <= budget


def test_pools_share_in_proportion_to_their_bytes():
    demands = {"full": PoolDemand(FULL, 64_000), "swa": PoolDemand(SWA, 6_400)}
    wanted = 64_000 * 23_040 + 6_400 * 199_680
    assert share_budget(wanted, demands) == {"full": 1000, "swa": 100}
    assert share_budget(2 * wanted, demands) == {"full": 2000, "swa": 200}
    assert share_budget(wanted - 1, demands) == {"full": 999, "swa": 99}


def test_a_share_without_a_page_is_refused_by_name():
    demands = {"full": PoolDemand(FULL, 64_000), "swa": PoolDemand(SWA, 64)}
    with pytest.raises(ValueError, match="Pool 'swa': one page takes 12779520 bytes, its share of 20000000 bytes is"):
        share_budget(20_000_000, demands)


sizes = st.integers(1, 10**6)


@given(st.integers(1, 10**13), st.lists(st.tuples(sizes, st.sampled_from([1, 16, 64]), sizes), min_size=1, max_size=4))
def test_a_shared_budget_is_kept_and_nearly_used(total, pools):
    demands = {f"pool{i}": PoolDemand(Geometry(b, p), tokens) for i, (b, p, tokens) in enumerate(pools)}
    try:
        pages = share_budget(total, demands)
    except ValueError:
        return
    page_bytes = {name: demand.spec.bytes_per_token * demand.spec.page_size for name, demand in demands.items()}
    spent = sum(pages[name] * page_bytes[name] for name in demands)
    assert spent <= total
    assert total - spent <= sum(page_bytes.values())


@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_both_roundings(tokens, page):
    up, down = pages_for_tokens(tokens, page), pages_for_tokens(tokens, page, rounding="down")
    assert down * page <= tokens < up * page
    assert up == down + 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pages_for_tokens(-1, 4), "tokens must be at least 0; got -1"),
        (lambda: pages_for_tokens(4, 0), "page_size must be at least 1; got 0"),
        (
            lambda: pages_for_tokens(4, 4, rounding=cast(Any, "nearest")),
            "rounding must be 'up' or 'down'; got 'nearest'",
        ),
        (lambda: pages_for_tokens(cast(Any, 4.5), 4), "tokens must be an integer; got 4.5"),
        (lambda: pages_from_ratio(100, 0, 4), "ratio must be finite and positive; got 0"),
        (lambda: pages_from_ratio(100, float("inf"), 4), "ratio must be finite and positive; got inf"),
        (lambda: pages_from_bytes(float("nan"), FULL), "nbytes must be finite and positive; got nan"),
        (lambda: share_budget(10, {}), "at least one pool"),
        (lambda: share_budget(0, {"a": PoolDemand(FULL, 1)}), "total_bytes must be at least 1; got 0"),
        (lambda: PoolDemand(FULL, 0), "device_tokens must be at least 1; got 0"),
    ],
)
def test_bad_figures_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
