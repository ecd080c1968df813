"""Gathering pages of per-layer caches into one block and scattering them back, for Hopper (Pallas Mosaic GPU)."""

from pallas_kernels.page_relayout.api import block_to_pages as block_to_pages
from pallas_kernels.page_relayout.api import pages_to_block as pages_to_block
from pallas_kernels.page_relayout.api import unsupported_reason as unsupported_reason
