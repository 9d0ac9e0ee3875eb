"""The passes: one file, one pass."""
