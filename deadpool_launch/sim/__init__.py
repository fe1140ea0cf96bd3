"""A cluster in one thread, made from a seed: the real controller under faults, in virtual time."""
