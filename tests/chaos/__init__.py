"""Chaos: real processes killed at random for a while, and a checker that goes by an independent ledger."""
