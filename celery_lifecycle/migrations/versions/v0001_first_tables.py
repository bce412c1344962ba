"""The first tables."""

from __future__ import annotations

from typing import Any

from alembic import context, op
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Index,
    Integer,
    PrimaryKeyConstraint,
    SmallInteger,
    Text,
    UniqueConstraint,
    text,
)

from celery_lifecycle.tables import BIG_ID, LONG_TEXT, ByteText

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

HOT_TABLE = {
    "fillfactor": "70",
    "autovacuum_vacuum_scale_factor": "0.01",
    "autovacuum_vacuum_threshold": "1000",
    "autovacuum_vacuum_cost_delay": "1",
}
HOT: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_default_charset": "utf8mb4",
    "postgresql_with": HOT_TABLE,
}
COLD: dict[str, Any] = {"mysql_engine": "InnoDB", "mysql_default_charset": "utf8mb4"}


def upgrade() -> None:
    prefix = context.config.attributes["prefix"]
    op.create_table(
        f"{prefix}objects",
        Column("id", BIG_ID, primary_key=True, autoincrement=True),
        Column("kind", ByteText(200), nullable=False),
        Column("name", ByteText(200), nullable=False),
        Column("queue", ByteText(200)),
        Column("phase", SmallInteger, nullable=False),
        Column("wake_at", BigInteger),
        Column("versions", BigInteger, nullable=False),
        Column("dispatch", ByteText(24)),
        Column("sent_until", BigInteger),
        Column("sent_count", Integer, nullable=False),
        Column("queue_wait", BigInteger, nullable=False),
        Column("token", ByteText(24)),
        Column("lease_until", BigInteger),
        Column("doubt", SmallInteger, nullable=False),
        Column("step", Integer, nullable=False),
        Column("in_flight", LONG_TEXT),
        Column("in_flight_task", ByteText(255)),
        Column("worker", ByteText(40)),
        Column("worker_pid", BigInteger),
        Column("paused", ByteText(200)),
        Column("disabled", SmallInteger, nullable=False),
        Column("not_before", BigInteger),
        Column("not_before_count", Integer, nullable=False),
        Column("strike_lines", LONG_TEXT),
        Column("holds", Integer, nullable=False),
        Column("stored", SmallInteger, nullable=False),
        Column("sealed", SmallInteger, nullable=False),
        UniqueConstraint("kind", "name", name=f"{prefix}objects_kind_name"),
        # The states of the diagram in docs/design.md; a test holds the two together.
        CheckConstraint(
            "phase = CASE WHEN token IS NOT NULL THEN 2 WHEN dispatch IS NOT NULL THEN 1 ELSE 0 END",
            name=f"{prefix}objects_phase",
        ),
        CheckConstraint("token IS NULL OR dispatch IS NULL", name=f"{prefix}objects_one_state"),
        CheckConstraint("token IS NOT NULL OR in_flight IS NULL", name=f"{prefix}objects_in_flight"),
        CheckConstraint("token IS NULL OR lease_until IS NOT NULL", name=f"{prefix}objects_lease"),
        CheckConstraint("dispatch IS NULL OR sent_until IS NOT NULL", name=f"{prefix}objects_sent"),
        CheckConstraint(
            "(queue IS NULL AND wake_at IS NULL) OR (queue IS NOT NULL AND wake_at IS NOT NULL)",
            name=f"{prefix}objects_alarm",
        ),
        Index(f"{prefix}objects_alarm_idx", "queue", "phase", "wake_at"),
        sqlite_autoincrement=True,
        **HOT,
    )
    op.create_table(
        f"{prefix}jobs",
        Column("object_id", BigInteger, nullable=False),
        Column("id", ByteText(200), nullable=False),
        Column("version", BigInteger, nullable=False),
        Column("line", ByteText(200), nullable=False),
        Column("owner", ByteText(200), nullable=False),
        Column("task", ByteText(255), nullable=False),
        Column("queue", ByteText(200), nullable=False),
        Column("due_at", BigInteger, nullable=False),
        Column("not_before", BigInteger),
        Column("payload", LONG_TEXT, nullable=False),
        Column("options", LONG_TEXT),
        Column("retry", Text),
        Column("schedule", Text),
        Column("singleflight", SmallInteger, nullable=False),
        Column("hung_timeout", BigInteger),
        Column("exclusive", SmallInteger, nullable=False),
        Column("recovery_loop", SmallInteger, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("strikes", Integer, nullable=False),
        Column("suspect_on", ByteText(64)),
        Column("unknown_since", BigInteger),
        Column("created_at", BigInteger, nullable=False),
        PrimaryKeyConstraint("object_id", "id", name=f"{prefix}jobs_pkey"),
        CheckConstraint("attempt >= 0 AND strikes >= 0", name=f"{prefix}jobs_counts"),
        Index(
            f"{prefix}jobs_suspect_idx",
            "suspect_on",
            unique=True,
            postgresql_where=text("suspect_on IS NOT NULL"),
            sqlite_where=text("suspect_on IS NOT NULL"),
        ),
        **HOT,
    )
    op.create_table(
        f"{prefix}storage",
        Column("object_id", BigInteger, nullable=False),
        Column("key", ByteText(200), nullable=False),
        Column("value", LONG_TEXT, nullable=False),
        PrimaryKeyConstraint("object_id", "key", name=f"{prefix}storage_pkey"),
        **COLD,
    )
    op.create_table(
        f"{prefix}dead_jobs",
        Column("id", BIG_ID, primary_key=True, autoincrement=True),
        Column("kind", ByteText(200), nullable=False),
        Column("name", ByteText(200), nullable=False),
        Column("job_id", ByteText(200), nullable=False),
        Column("reason", ByteText(40), nullable=False),
        Column("job", LONG_TEXT, nullable=False),
        Column("error", LONG_TEXT),
        Column("traceback", LONG_TEXT),
        Column("details", LONG_TEXT, nullable=False),
        Column("died_at", BigInteger, nullable=False),
        Index(f"{prefix}dead_jobs_object_idx", "kind", "name", "job_id"),
        Index(f"{prefix}dead_jobs_died_idx", "died_at"),
        sqlite_autoincrement=True,
        **COLD,
    )
    op.create_table(
        f"{prefix}heartbeats",
        Column("kind", ByteText(20), nullable=False),
        Column("key", ByteText(255), nullable=False),
        Column("object_id", BigInteger),
        Column("job_id", ByteText(200)),
        Column("expires_at", BigInteger, nullable=False),
        Column("data", LONG_TEXT, nullable=False),
        PrimaryKeyConstraint("kind", "key", name=f"{prefix}heartbeats_pkey"),
        Index(f"{prefix}heartbeats_expires_idx", "kind", "expires_at"),
        Index(f"{prefix}heartbeats_object_idx", "object_id"),
        **COLD,
    )
    op.create_table(
        f"{prefix}beat_entries",
        Column("app", ByteText(200), nullable=False),
        Column("name", ByteText(200), nullable=False),
        Column("last_run_at", BigInteger, nullable=False),
        Column("total_run_count", BigInteger, nullable=False),
        Column("claimed_by", ByteText(40)),
        Column("claimed_until", BigInteger),
        PrimaryKeyConstraint("app", "name", name=f"{prefix}beat_entries_pkey"),
        **COLD,
    )
    op.create_table(
        f"{prefix}meta",
        Column("name", ByteText(200), nullable=False),
        Column("value", ByteText(200), nullable=False),
        PrimaryKeyConstraint("name", name=f"{prefix}meta_pkey"),
        **COLD,
    )


def downgrade() -> None:
    prefix = context.config.attributes["prefix"]
    for name in ("objects", "jobs", "storage", "dead_jobs", "heartbeats", "beat_entries", "meta"):
        op.drop_table(f"{prefix}{name}")
