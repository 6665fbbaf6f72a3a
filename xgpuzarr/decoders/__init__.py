"""Encoded bytes into decoded bytes, on the device or the host."""
