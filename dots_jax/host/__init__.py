"""Key/value buffers in host memory."""
