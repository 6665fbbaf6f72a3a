"""Pure planning: what to read and where it goes. NumPy and the standard library only; no I/O, no GPU."""
