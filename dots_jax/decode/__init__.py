"""Decode: attention over the paged latent window, and reading and writing the latent cache."""
