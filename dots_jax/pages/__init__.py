"""Page tables and page pools: frozen pytrees and pure functions on them."""
