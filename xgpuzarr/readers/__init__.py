"""Encoded bytes out of stores and into memory."""
