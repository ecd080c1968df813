"""Page tables and the pool they draw from, as frozen pytrees and pure functions on them."""

from dots_jax.pages.fork import fork
from dots_jax.pages.growth import Extension, copy_pages, extend
from dots_jax.pages.pool import PagePool, PagePoolError, check_pool
from dots_jax.pages.release import free_rows, release_outside_window, rollback
from dots_jax.pages.slots import swa_table_from_slots
from dots_jax.pages.table import PageTable

__all__ = [
    "Extension",
    "PagePool",
    "PagePoolError",
    "PageTable",
    "check_pool",
    "copy_pages",
    "extend",
    "fork",
    "free_rows",
    "release_outside_window",
    "rollback",
    "swa_table_from_slots",
]
