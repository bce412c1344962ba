"""Acceptance tests: real workers and beats, started by their command line, killed and restarted."""
