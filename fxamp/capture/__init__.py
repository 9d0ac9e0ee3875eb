"""From a module to a graph."""
