"""Fused sliding-window latent decode over 64-token pages, for Hopper (Pallas Mosaic GPU)."""

from pallas_kernels.swa_latent_decode.api import cannot_simulate as cannot_simulate
from pallas_kernels.swa_latent_decode.api import decode as decode
from pallas_kernels.swa_latent_decode.config import Config as Config
from pallas_kernels.swa_latent_decode.config import default_config as default_config
from pallas_kernels.swa_latent_decode.config import unsupported_reason as unsupported_reason
