"""Migrations make what the metadata declares, on every database; the tables are verified with the command to type."""

import os
import subprocess
import sys

import pytest
import sqlalchemy
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

from celery_lifecycle.config import read_config
from celery_lifecycle.errors import SchemaOutdated
from celery_lifecycle.migrations import revision, schema
from celery_lifecycle.migrations.revision import HEAD, REVISIONS, current, verify
from celery_lifecycle.model import ObjectRef
from celery_lifecycle.store.database import Database
from celery_lifecycle.tables import make_tables
from tests.support import tables
from tests.support.protocol import table

TABLES = ("objects", "jobs", "storage", "dead_jobs", "heartbeats", "beat_entries", "meta")


def test_the_revisions_are_those_of_the_scripts(tmp_path):
    database = Database(read_config({"database_url": f"sqlite:///{tmp_path}/none.db"}))
    scripts = ScriptDirectory.from_config(schema._config(database)).walk_revisions()
    assert tuple(reversed([script.revision for script in scripts])) == REVISIONS


def test_a_process_that_migrates_nothing_does_not_load_alembic():
    """It would cost every start of a worker, a beat and a client a fifth of a second, and each process 11 MiB."""
    code = "import sys, celery_lifecycle.worker, celery_lifecycle.beat, celery_lifecycle.cli; print('alembic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def job_database(database_url):
    made = Database(read_config({"database_url": database_url, "table_prefix": "shop_"}))
    yield made
    made.close()


def declared(job_database):
    return make_tables(job_database.config.table_prefix).metadata


def test_migrations_and_metadata_are_equal(job_database):
    """Tables, columns with their types, defaults and nullability, indexes, constraints: Alembic finds nothing to add."""
    schema.migrate(job_database)
    with job_database.engine.connect() as connection:
        options = {
            "compare_type": True,
            "compare_server_default": True,
            "include_name": lambda name, kind, _: kind != "table" or name != "shop_alembic_version",
        }
        assert compare_metadata(MigrationContext.configure(connection, opts=options), declared(job_database)) == []


def test_the_database_has_the_same_definitions_whether_migrated_or_created_from_the_metadata(job_database, database):
    """What Alembic does not compare: server options such as fillfactor, collations, checks, conditions of indexes."""
    schema.migrate(job_database)
    migrated = described(job_database, database.kind)
    with job_database.engine.begin() as connection:
        declared(job_database).drop_all(connection)
        declared(job_database).create_all(connection)
    assert migrated == described(job_database, database.kind)
    assert len(migrated) > 0


def test_the_tables_that_tests_copy_are_those_of_a_migration(job_database, database):
    tables.make_tables(job_database)
    verify(job_database)
    copied = described(job_database, database.kind)
    with job_database.engine.begin() as connection:
        declared(job_database).drop_all(connection)
        connection.exec_driver_sql("DROP TABLE shop_alembic_version")
    schema.migrate(job_database)
    assert copied == described(job_database, database.kind)


def described(job_database, kind):
    """The database's own words for each table and index."""
    with job_database.engine.connect() as connection:
        if kind == "sqlite":
            rows = connection.exec_driver_sql(
                "SELECT name, sql FROM sqlite_master WHERE name LIKE 'shop_%' AND name != 'shop_alembic_version'"
            )
            return {name: " ".join((sql or "").split()) for name, sql in rows}
        if kind == "mariadb":
            return {
                name: sorted(
                    line.rstrip(",")
                    for line in connection.exec_driver_sql(f"SHOW CREATE TABLE shop_{name}").one()[1].splitlines()
                )
                for name in TABLES
            }
        queries = (
            "SELECT relname, reloptions::text, relkind FROM pg_class WHERE relname LIKE 'shop_%%'"
            " AND relnamespace = current_schema()::regnamespace",
            "SELECT relname || '.' || attname, format_type(atttypid, atttypmod), attcollation::regcollation::text,"
            " attnotnull, attidentity::text, pg_get_expr(adbin, adrelid) FROM pg_attribute"
            " JOIN pg_class ON pg_class.oid = attrelid LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum"
            " WHERE relname LIKE 'shop_%%' AND relnamespace = current_schema()::regnamespace AND attnum > 0",
            "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE connamespace = current_schema()::regnamespace",
            "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema()",
        )
        return {row[0]: tuple(row[1:]) for query in queries for row in connection.exec_driver_sql(query)
                if "alembic_version" not in row[0]}  # fmt: skip


@pytest.mark.databases("postgresql")
def test_hot_tables_leave_room_on_their_pages_and_are_vacuumed_early(job_database):
    schema.migrate(job_database)
    with job_database.engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT relname, reloptions FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
        )
        options = {name: set(given or ()) for name, given in rows}
    for name in ("shop_objects", "shop_jobs"):
        assert "fillfactor=70" in options[name]
        assert any(one.startswith("autovacuum_vacuum_scale_factor") for one in options[name])


@pytest.mark.databases("postgresql", "mariadb")
def test_every_text_that_is_compared_compares_byte_by_byte(job_database, database):
    schema.migrate(job_database)
    wanted = {"postgresql": {"C"}, "mariadb": {"utf8mb4_nopad_bin"}}[database.kind]
    inspected = inspect(job_database.engine)
    for name in TABLES:
        for column in inspected.get_columns(f"shop_{name}"):
            kind = column["type"]
            if isinstance(kind, sqlalchemy.VARCHAR):
                assert kind.collation in wanted, (name, column["name"])


def test_the_prefix_is_that_of_every_table_and_index_and_two_prefixes_live_side_by_side(database_url):
    for prefix in ("shop_", "x"):
        with table(database_url, table_prefix=prefix) as made:
            made.push("a")
            assert made.count("jobs") == 1
            verify(made.store.database)
            inspected = inspect(made.store.database.engine)
    names = set(inspected.get_table_names())
    for prefix in ("shop_", "x"):
        assert {f"{prefix}{name}" for name in (*TABLES, "alembic_version")} <= names
    assert len(names) == 2 * (len(TABLES) + 1)
    for name in names:
        for index in inspected.get_indexes(name):
            assert str(index["name"]).startswith(("shop_", "x"))


def test_a_prefix_with_capital_letters_is_used_as_it_is_written(database_url):
    with table(database_url, table_prefix="Shop_") as made:
        made.push("a")
        made.store.jobs.push_many([made.draft("b", ObjectRef("cart", "b"))])
        assert (made.ids(), made.ids(ObjectRef("cart", "b"))) == (["a"], ["b"])
        assert [chain.jobs[0].id for chain in made.claim().shipments] == ["a", "b"]
        assert "Shop_objects" in inspect(made.store.database.engine).get_table_names()


def test_migrating_twice_changes_nothing(job_database):
    first = schema.migrate(job_database)
    assert schema.migrate(job_database) == first == HEAD
    verify(job_database)


def test_a_downgrade_leaves_nothing_and_an_upgrade_brings_it_back(job_database):
    schema.migrate(job_database)
    with job_database.engine.connect() as connection, schema._alone(connection):
        command.downgrade(schema._config(job_database, connection), "base")
    assert current(job_database) is None
    assert inspect(job_database.engine).get_table_names() == ["shop_alembic_version"]
    schema.migrate(job_database)
    verify(job_database)


def test_the_objects_keep_their_jobs_when_a_migrated_database_is_migrated_again(database_url):
    with table(database_url) as made:
        made.push("a", delay=60)
        schema.migrate(made.store.database)
        assert made.ids() == ["a"]


def test_missing_tables_are_told_with_the_command(job_database):
    with pytest.raises(
        SchemaOutdated, match=r"missing \(revision None, needed \w+\)\. Run: celery -A .* lifecycle migrate"
    ):
        verify(job_database)


def stamped(job_database, revision):
    schema.migrate(job_database)
    with job_database.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE shop_alembic_version SET version_num = '{revision}'")


def test_newer_tables_are_told_as_such(job_database):
    stamped(job_database, "9999")
    with pytest.raises(SchemaOutdated, match=r"of a newer version.*revision 9999.*lifecycle migrate"):
        verify(job_database)


def test_old_tables_are_told_with_the_command(job_database, monkeypatch):
    """There is one revision so far: the package is told that it needs another one."""
    schema.migrate(job_database)
    monkeypatch.setattr(revision, "HEAD", "0002")
    with pytest.raises(SchemaOutdated, match=rf"old \(revision {HEAD}, needed 0002\).*lifecycle migrate"):
        verify(job_database)


MIGRATE = """
import sys
from celery_lifecycle.config import read_config
from celery_lifecycle.migrations.schema import migrate
from celery_lifecycle.store.database import Database
database = Database(read_config({"database_url": sys.argv[1], "table_prefix": "shop_"}))
sys.stdin.readline()
print(migrate(database))
"""


def test_processes_that_migrate_at_the_same_time_wait_for_each_other(job_database, database_url):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MIGRATE, database_url], env=dict(os.environ), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, told
    assert {out.strip() for out, _ in told} == {HEAD}
    verify(job_database)


def test_a_migration_that_fails_leaves_the_database_to_the_next_one(job_database, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("broken migration")

    with monkeypatch.context() as broken:
        broken.setattr(schema.command, "upgrade", fails)
        with pytest.raises(RuntimeError, match="broken migration"):
            schema.migrate(job_database)
    assert current(job_database) is None
    schema.migrate(job_database)
    verify(job_database)


@pytest.mark.databases("mariadb")
def test_who_waits_in_vain_for_another_migration_is_told_so(job_database, monkeypatch):
    with job_database.engine.connect() as other:
        other.exec_driver_sql("SELECT GET_LOCK('celery_lifecycle', 0)")
        monkeypatch.setattr(schema, "WAIT", 0)
        with pytest.raises(schema.DatabaseUnavailable, match=r"Another process.*migrate again"):
            schema.migrate(job_database)
    assert current(job_database) is None
