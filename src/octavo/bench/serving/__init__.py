"""``octavo serve-bench``: whole requests through an inference engine, with Octavo off and on, in one run.

``models`` makes or loads what is served, ``engine`` generates with it, ``contenders`` says what stands beside what,
``measure`` checks and times, ``report`` writes.
"""
