"""Measurements of what the tests can't assert: time."""
