"""Tables, diffs and explanations of what the passes decided."""
