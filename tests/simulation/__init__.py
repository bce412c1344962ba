"""Deterministic simulation: the protocol's own code under a simulated clock, broker, workers, beats and clients."""
