"""Flower with a Lifecycle page."""
