"""Alembic's environment: it runs on the connection, prefix and version table that `schema` hands over."""

from __future__ import annotations

from alembic import context

config = context.config

context.configure(
    connection=config.attributes["connection"],
    target_metadata=config.attributes["tables"].metadata,
    version_table=config.attributes["version_table"],
    transaction_per_migration=False,
)
context.run_migrations()
