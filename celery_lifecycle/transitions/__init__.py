"""The alarm protocol as pure functions: the specification. No I/O, no clock, no randomness; all of these are arguments."""
