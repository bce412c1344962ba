"""Checks a deployment without starting anything."""
