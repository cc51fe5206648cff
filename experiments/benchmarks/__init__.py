"""What replay, decoding and simulation cost: tasks that are measured anew each time they are asked for.

A benchmark each: ``replay``, ``decode``, ``simulation``, ``gpu``. What they share: ``common`` (what makes a task of
one, checks of options), ``models`` (model, text, and how a cache is fed), ``timing`` (the clock, taking turns, the
machine's name, what the profiler saw), ``tables`` and ``axes``.
"""
