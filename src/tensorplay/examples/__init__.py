"""Programs that show the optimizers at work; each runs with ``python -m tensorplay.examples.NAME``."""
