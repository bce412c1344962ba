"""The example shop, and the demo that plays it."""
