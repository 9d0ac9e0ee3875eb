"""Dynamo as the second front door, for what our own tracer cannot follow."""
