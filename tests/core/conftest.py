"""Property tests here are many and their plans small: fewer examples, and no deadline."""

from hypothesis import settings

settings.register_profile("core", max_examples=25, deadline=None)
settings.load_profile("core")
