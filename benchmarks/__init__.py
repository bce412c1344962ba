"""Benchmarks: `python -m benchmarks` measures this package beside bare Celery, in one run on one machine."""
