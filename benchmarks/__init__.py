"""Measurements of what the package promises; each module runs with ``python -m benchmarks.NAME``."""
