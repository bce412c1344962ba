"""All tests of celery_lifecycle."""
