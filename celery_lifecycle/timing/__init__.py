"""Times and schedules as pure functions: nothing in here reads a clock, a random source or a connection."""
