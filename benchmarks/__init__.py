"""Measurements of what the package promises: ``python -m benchmarks`` lists them."""
