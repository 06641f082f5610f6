"""The parts of the demonstration `tensorplay.examples.train_lm`.

Read them in this order: ``options`` (what the user asks for), ``text`` and ``model`` (what is
learned, and by what), ``placement`` (the one thing that differs between the two runs: where the
optimizer state lives), ``training`` (the run), ``checkpoint``, ``processes`` (torchrun, signals),
``memory`` and ``report`` (what is measured and shown).
"""
