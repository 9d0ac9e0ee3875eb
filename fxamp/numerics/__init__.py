"""Statistics of real values: ranges, comparison, first bad node."""
