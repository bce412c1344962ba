"""Which revision the tables have, and which one this version of the package needs.

Without Alembic: beats, workers and clients ask at every start, and only who migrates should have to load it.
"""

from __future__ import annotations

from celery_lifecycle.errors import SchemaOutdated
from celery_lifecycle.store.database import Database, Tx

REVISIONS = ("0001",)
"""The revisions in `versions/`, oldest first."""
HEAD = REVISIONS[-1]


def current(database: Database) -> str | None:
    """The revision that the tables have; None if there are none.

    Raises:
        DatabaseUnavailable: the database can't be reached.
    """

    def look(tx: Tx) -> str | None:
        row = tx.row(tx.sql.get_revision)
        return str(row[0]) if row is not None else None

    try:
        return database.look(look)
    except SchemaOutdated:  # not even the table for it
        return None


def verify(database: Database) -> None:
    """Check that the tables are those of this version.

    Raises:
        DatabaseUnavailable: the database can't be reached.
        SchemaOutdated: they are missing, old, or newer than this package.
    """
    have = current(database)
    if have == HEAD:
        return
    what = "missing" if have is None else "old" if have in REVISIONS else "of a newer version of this package"
    raise SchemaOutdated(
        f"The tables of celery_lifecycle in {database.url.render_as_string(hide_password=True)} are {what} (revision"
        f" {have}, needed {HEAD}). Run: celery -A <your app> lifecycle migrate"
    )


def upgrade(database: Database) -> None:
    """Make the tables, or bring them to this version, if they are not.

    Raises:
        DatabaseUnavailable: the database can't be reached.
    """
    if current(database) != HEAD:
        from celery_lifecycle.migrations.schema import migrate  # loads Alembic

        migrate(database)
