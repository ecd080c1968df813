"""Pallas GPU kernels, one folder for each operation."""
