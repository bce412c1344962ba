"""Every statement that runs at run time, written once; what differs between databases is spelled in one place."""

from __future__ import annotations

import re
from typing import Final

OBJECT_COLUMNS: Final = (
    "id", "kind", "name", "queue", "wake_at", "versions", "dispatch", "sent_until", "sent_count", "queue_wait", "token",
    "lease_until", "doubt", "step", "in_flight", "worker", "worker_pid", "paused", "disabled", "not_before",
    "not_before_count", "strike_lines", "holds", "stored", "sealed",
)  # fmt: skip
# Written along with the others, for indexes and matches: they follow from the state and are never read.
SHADOW_COLUMNS: Final = ("phase", "in_flight_task")
# What a claim changes, after the object's id, with the types of their arrays.
CLAIMED_COLUMNS: Final = {
    "id": "bigint", "queue": "varchar", "wake_at": "bigint", "phase": "smallint", "dispatch": "varchar",
    "sent_until": "bigint", "sent_count": "int", "lease_until": "bigint",
}  # fmt: skip
JOB_COLUMNS: Final = (
    "id", "version", "line", "owner", "task", "queue", "due_at", "not_before", "payload", "options", "retry",
    "schedule", "singleflight", "hung_timeout", "exclusive", "recovery_loop", "attempt", "strikes", "suspect_on",
    "unknown_since", "created_at",
)  # fmt: skip

# What is not null or 0 in a new row, with the type of its array.
NEW_OBJECT_COLUMNS: Final = {
    "kind": "varchar",
    "name": "varchar",
    "queue": "varchar",
    "wake_at": "bigint",
    "versions": "bigint",
}
NEW_JOB_COLUMNS: Final = {
    "object_id": "bigint", "id": "varchar", "version": "bigint", "line": "varchar", "owner": "varchar",
    "task": "varchar", "queue": "varchar", "due_at": "bigint", "payload": "text", "options": "text", "retry": "text",
    "schedule": "text", "singleflight": "smallint", "hung_timeout": "bigint", "exclusive": "smallint",
    "recovery_loop": "smallint", "created_at": "bigint",
}  # fmt: skip

_EFFECTIVE = "CASE WHEN not_before > due_at THEN not_before ELSE due_at END"

_NOW = {
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)",
    "mysql": "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', UTC_TIMESTAMP(6)) DIV 1000)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
}
_IDS = {
    "postgresql": "ANY(:ids)",
    "mysql": "(SELECT v FROM JSON_TABLE(:ids, '$[*]' COLUMNS (v BIGINT PATH '$')) AS given)",
    "sqlite": "(SELECT value FROM json_each(:ids))",
}


class Sql:
    """The statements for one table prefix and one database, in the parameter style of its driver."""

    def __init__(self, prefix: str, dialect: str) -> None:
        self.dialect = "mysql" if dialect == "mariadb" else dialect
        self.prefix = prefix
        self.combines_writes = self.takes_arrays = self.dialect == "postgresql"
        lock = "" if self.dialect == "sqlite" else " FOR UPDATE"
        skip = "" if self.dialect == "sqlite" else " FOR UPDATE SKIP LOCKED"
        now, ids = _NOW[self.dialect], _IDS[self.dialect]
        # PostgreSQL takes what is not quoted for lower case; the migrations quote a prefix that has capital letters.
        quote = '"' if self.dialect == "postgresql" else ""
        o, j, s, d, h, b, m = (
            f"{quote}{prefix}{name}{quote}"
            for name in ("objects", "jobs", "storage", "dead_jobs", "heartbeats", "beat_entries", "meta")
        )
        columns = ", ".join(OBJECT_COLUMNS)
        job_columns = ", ".join(self._quoted(name) for name in JOB_COLUMNS)
        key = self._quoted("key")

        self.now = self._(f"SELECT {now}")
        # Alembic's own table.
        self.get_revision = self._(f"SELECT version_num FROM {quote}{prefix}alembic_version{quote}")

        # --- objects
        self.lock_object = self._(f"SELECT {columns} FROM {o} WHERE id = :object{lock}")
        self.lock_named = self._(f"SELECT {columns} FROM {o} WHERE kind = :kind AND name = :name{lock}")
        self.lock_named_if_free = self._(f"SELECT {columns} FROM {o} WHERE kind = :kind AND name = :name{skip}")
        self.find_named = self._(f"SELECT {columns} FROM {o} WHERE kind = :kind AND name = :name")
        self.list_objects = self._(
            f"SELECT {columns} FROM {o} WHERE (:kind IS NULL OR kind = :kind) AND id > :after ORDER BY id LIMIT :limit"
            if self.dialect != "postgresql"
            else f"SELECT {columns} FROM {o} WHERE (CAST(:kind AS varchar) IS NULL OR kind = :kind) AND id > :after"
            " ORDER BY id LIMIT :limit"
        )
        inserted = (
            f"INSERT INTO {o} (kind, name, phase, versions, sent_count, queue_wait, doubt, step, disabled,"
            " not_before_count, holds, stored, sealed) VALUES (:kind, :name, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)"
        )
        self.insert_object = self._(
            f"{inserted} ON DUPLICATE KEY UPDATE id = LAST_INSERT_ID(id)"
            if self.dialect == "mysql"
            else f"{inserted} ON CONFLICT (kind, name) DO NOTHING RETURNING id, {now}"
        )
        self.insert_objects = self._(self._insert_objects(o))
        written = [name for name in (*OBJECT_COLUMNS, *SHADOW_COLUMNS) if name not in ("id", "kind", "name")]
        self.update_object = self._(
            f"UPDATE {o} SET {', '.join(f'{name} = :{name}' for name in written)} WHERE id = :id"
        )
        self.delete_object = self._(f"DELETE FROM {o} WHERE id = :id")
        self.update_claimed = self._(self._claimed_update(o))
        self.next_queue = self._(f"SELECT min(queue) FROM {o} WHERE queue > :queue")
        # Of the first queue behind a given one: one look does for most deployments.
        first = f"(SELECT wake_at FROM {o} WHERE queue = q.queue AND phase = {{}} ORDER BY wake_at LIMIT 1)"
        self.queue_heads = self._(
            f"SELECT {now}, q.queue, {first.format(0)}, {first.format(1)}, {first.format(2)},"
            f" (SELECT min(queue) FROM {o} WHERE queue > q.queue)"
            f" FROM (SELECT min(queue) AS queue FROM {o} WHERE queue > :queue) AS q"
        )
        # Of few rows MySQL and MariaDB may sort all instead, and lock whatever is due: other beats would find nothing.
        by_alarm = f" FORCE INDEX ({prefix}objects_alarm_idx)" if self.dialect == "mysql" else ""
        self.claimable = self._(
            f"SELECT {columns} FROM {o}{by_alarm} WHERE queue = :queue AND phase = :phase AND wake_at <= :now"
            f" ORDER BY wake_at LIMIT :limit{skip}"
        )
        self.count_sent = self._(
            f"SELECT count(*) FROM (SELECT 1 AS one FROM {o} WHERE queue = :queue AND phase = 1 LIMIT :limit) AS t"
        )
        self.renewable = self._(
            f"SELECT id, in_flight_task, worker_pid FROM {o} WHERE id {self._is_in(ids)} AND worker = :worker{skip}"
        )
        self.renew = self._(f"UPDATE {o} SET lease_until = :lease, doubt = 0 WHERE id {self._is_in(ids)}")
        self.aboard = self._(
            f"SELECT id, in_flight FROM {o} WHERE queue = :queue AND phase = 2 AND worker = :worker"
            " AND in_flight IS NOT NULL ORDER BY id"
        )
        self.lock_stale = self._(
            f"SELECT {columns} FROM {o} WHERE queue IS NULL AND (strike_lines IS NOT NULL OR not_before <= :now)"
            f" AND id > :after ORDER BY id LIMIT :limit{skip}"
        )

        # --- jobs
        self.job = self._(f"SELECT {job_columns} FROM {j} WHERE object_id = :object AND id = :job")
        self.job_now = self._(
            f"SELECT {now}, {', '.join('j.' + self._quoted(name) for name in JOB_COLUMNS)} FROM (SELECT 1 AS one) AS o"
            f" LEFT JOIN {j} AS j ON j.object_id = :object AND j.id = :job"
        )
        self.agenda = self._(self._agenda(j, "object_id = :object", now))
        self.agendas = self._(self._briefs(j, f"object_id {self._is_in(ids)}", now))
        self.locked_agenda = self._(
            f"SELECT {now}, object_id, {_EFFECTIVE}, {job_columns} FROM {j} WHERE object_id = :object{lock}"
        )
        self.related_jobs = self._(
            f"SELECT {job_columns} FROM {j} WHERE object_id = :object"
            " AND (id = :job OR line = :line OR recovery_loop = 1) ORDER BY id"
        )
        self.every_job_of = self._(f"SELECT {job_columns} FROM {j} WHERE object_id = :object ORDER BY id")
        # Ids that begin with `#` are the protocol's own.
        self.jobs_of = self._(f"SELECT {job_columns} FROM {j} WHERE object_id = :object AND (id < '#' OR id >= '$')")
        # MySQL shows an old snapshot to all but locking reads inside a caller's transaction.
        self.schedules_like = self._(
            f"SELECT {job_columns} FROM {j} WHERE object_id = :object AND owner = :owner AND task = :task"
            f" AND schedule IS NOT NULL{lock if self.dialect == 'mysql' else ''}"
        )
        self.schedules_of_kind = self._(
            f"SELECT o.name, {', '.join('j.' + self._quoted(name) for name in JOB_COLUMNS)} FROM {o} AS o"
            f" JOIN {j} AS j ON j.object_id = o.id WHERE o.kind = :kind AND j.owner = :owner AND j.schedule IS NOT NULL"
        )
        self.overdue_schedules = self._(
            f"SELECT {job_columns} FROM {j} WHERE object_id = :object AND schedule IS NOT NULL AND due_at <= :now"
        )
        self.put_job = self._(self._put_job(j))
        self.insert_jobs = self._(self._insert_jobs(j))
        self.update_job = self._(
            f"UPDATE {j} SET version = :j_version, due_at = :j_due_at, not_before = :j_not_before,"
            " schedule = :j_schedule, attempt = :j_attempt, strikes = :j_strikes, suspect_on = :j_suspect_on,"
            " unknown_since = :j_unknown_since WHERE object_id = :j_object_id AND id = :j_id"
        )
        self.delete_job = self._(f"DELETE FROM {j} WHERE object_id = :j_object_id AND id = :j_id")
        self.delete_jobs = self._(f"DELETE FROM {j} WHERE object_id = :object")
        self.suspect_on = self._(f"SELECT object_id, id FROM {j} WHERE suspect_on = :mark")
        self.count_jobs = self._(f"SELECT count(*) FROM {j}")

        # --- storage
        self.get_value = self._(f"SELECT value FROM {s} WHERE object_id = :object AND {key} = :key")
        self.list_values = self._(
            f"SELECT {key}, value FROM {s} WHERE object_id = :object AND {key} >= :prefix ORDER BY {key}"
        )
        put_value = f"INSERT INTO {s} (object_id, {key}, value) VALUES (:object, :key, :value)"
        self.put_value = self._(
            f"{put_value} ON DUPLICATE KEY UPDATE value = VALUES(value)"
            if self.dialect == "mysql"
            else f"{put_value} ON CONFLICT (object_id, {key}) DO UPDATE SET value = excluded.value"
        )
        self.delete_value = self._(f"DELETE FROM {s} WHERE object_id = :object AND {key} = :key")
        self.delete_values = self._(f"DELETE FROM {s} WHERE object_id = :object")
        self.any_value = self._(f"SELECT 1 FROM {s} WHERE object_id = :object LIMIT 1")

        # --- dead jobs
        dead = "id, kind, name, job_id, reason, job, error, traceback, details, died_at"
        self.add_dead = self._(
            f"INSERT INTO {d} (kind, name, job_id, reason, job, error, traceback, details, died_at)"
            " VALUES (:kind, :name, :job_id, :reason, :job, :error, :traceback, :details, :died_at)"
        )
        self.find_dead = self._(f"SELECT {dead} FROM {d} WHERE id = :id")
        self.lock_dead = self._(f"SELECT {dead} FROM {d} WHERE id = :id{lock}")
        self.dead_of = self._(
            f"SELECT {dead} FROM {d} WHERE kind = :kind AND name = :name AND id > :after ORDER BY id LIMIT :limit"
        )
        self.list_dead = self._(f"SELECT {dead} FROM {d} WHERE id > :after ORDER BY id LIMIT :limit")
        self.sealed_dead = self._(
            f"SELECT {dead} FROM {d} WHERE kind = :kind AND name = :name AND reason = 'sealed' ORDER BY id"
        )
        self.misfire_of = self._(
            f"SELECT id, details FROM {d} WHERE kind = :kind AND name = :name AND job_id = :job"
            " AND reason = 'misfired' ORDER BY id DESC LIMIT 1"
        )
        self.update_misfire = self._(f"UPDATE {d} SET details = :details, died_at = :died_at WHERE id = :id")
        self.delete_dead = self._(f"DELETE FROM {d} WHERE id = :id")
        self.lift_dead = self._(f"UPDATE {d} SET reason = 'lifted' WHERE id = :id")
        self.lift_all_dead = self._(
            f"UPDATE {d} SET reason = 'lifted' WHERE kind = :kind AND name = :name AND reason = 'sealed'"
        )
        self.old_dead = self._(f"SELECT {dead} FROM {d} WHERE died_at < :before ORDER BY died_at LIMIT :limit")
        self.count_dead = self._(f"SELECT reason, count(*) FROM {d} GROUP BY reason")

        # --- heartbeats
        beats = f"kind, {key}, object_id, job_id, expires_at, data"
        put_beat = f"INSERT INTO {h} ({beats}) VALUES (:kind, :key, :object, :job, :expires_at, :data)"
        self.put_heartbeat = self._(
            f"{put_beat} ON DUPLICATE KEY UPDATE expires_at = VALUES(expires_at), data = VALUES(data)"
            if self.dialect == "mysql"
            else f"{put_beat} ON CONFLICT (kind, {key}) DO UPDATE SET"
            " expires_at = excluded.expires_at, data = excluded.data"
        )
        self.add_heartbeat = self._(
            f"{put_beat} ON DUPLICATE KEY UPDATE data = data"
            if self.dialect == "mysql"
            else f"{put_beat} ON CONFLICT (kind, {key}) DO NOTHING"
        )
        self.get_heartbeat = self._(f"SELECT {beats} FROM {h} WHERE kind = :kind AND {key} = :key")
        self.lock_heartbeat = self._(f"SELECT {beats} FROM {h} WHERE kind = :kind AND {key} = :key{lock}")
        self.list_heartbeats = self._(f"SELECT {beats} FROM {h} WHERE kind = :kind ORDER BY {key}")
        self.heartbeats_of = self._(f"SELECT {beats} FROM {h} WHERE object_id = :object ORDER BY kind, {key}")
        self.extend_heartbeat = self._(f"UPDATE {h} SET expires_at = :expires_at WHERE kind = :kind AND {key} = :key")
        self.update_heartbeat = self._(
            f"UPDATE {h} SET expires_at = :expires_at, data = :data WHERE kind = :kind AND {key} = :key"
        )
        self.delete_expired = self._(
            f"DELETE FROM {h} WHERE kind = :kind AND {key} = :key AND expires_at = :expires_at"
        )
        self.delete_heartbeat = self._(f"DELETE FROM {h} WHERE kind = :kind AND {key} = :key")
        self.delete_heartbeats = self._(f"DELETE FROM {h} WHERE object_id = :object")
        self.expired_heartbeats = self._(
            f"SELECT {beats} FROM {h} WHERE kind = :kind AND expires_at < :now ORDER BY expires_at LIMIT :limit"
        )
        self.purge_heartbeats = self._(f"DELETE FROM {h} WHERE kind = :kind AND expires_at < :now")

        # --- beat entries and facts about the database
        entry = "app = :app AND name = :name"
        put_entry = (
            f"INSERT INTO {b} (app, name, last_run_at, total_run_count) VALUES (:app, :name, :last_run_at, :count)"
        )
        self.add_entry = self._(
            f"{put_entry} ON DUPLICATE KEY UPDATE total_run_count = total_run_count"
            if self.dialect == "mysql"
            else f"{put_entry} ON CONFLICT (app, name) DO NOTHING"
        )
        self.get_entry = self._(f"SELECT last_run_at, total_run_count FROM {b} WHERE {entry}")
        self.lock_entry = self._(
            f"SELECT last_run_at, total_run_count, claimed_by, claimed_until FROM {b} WHERE {entry}{skip}"
        )
        self.claim_entry = self._(f"UPDATE {b} SET claimed_by = :beat, claimed_until = :until WHERE {entry}")
        self.release_entry = self._(
            f"UPDATE {b} SET claimed_by = NULL, claimed_until = NULL WHERE {entry} AND claimed_by = :beat"
        )
        self.record_entry = self._(
            f"UPDATE {b} SET last_run_at = :last_run_at, total_run_count = :count, claimed_by = NULL,"
            f" claimed_until = NULL WHERE {entry} AND last_run_at = :seen_at AND total_run_count = :seen_count"
        )
        self.delete_entry = self._(f"DELETE FROM {b} WHERE {entry}")
        self.list_entries = self._(f"SELECT name, last_run_at, total_run_count FROM {b} WHERE app = :app")
        put_meta = f"INSERT INTO {m} (name, value) VALUES (:name, :value)"
        self.add_meta = self._(
            f"{put_meta} ON DUPLICATE KEY UPDATE value = value"
            if self.dialect == "mysql"
            else f"{put_meta} ON CONFLICT (name) DO NOTHING"
        )
        self.get_meta = self._(f"SELECT value FROM {m} WHERE name = :name")

        # --- what people look at: reads only
        picked = (
            f"{self._given('kind')} AND name >= :prefix AND name < :end AND (kind > :after_kind OR"
            " (kind = :after_kind AND name > :after_name)) ORDER BY kind, name LIMIT :limit"
        )
        self.pick_objects = {
            which: self._(f"SELECT {columns} FROM {o} WHERE {condition} AND {picked}")
            for which, condition in {
                "any": "1 = 1",
                "idle": "phase = 0 AND wake_at IS NOT NULL",
                "overdue": "wake_at < :now",
                "sent": "phase = 1",
                "running": "phase = 2",
                "paused": "paused IS NOT NULL",
                "disabled": "disabled = 1",
                "struck": "(strike_lines IS NOT NULL OR sealed = 1)",
            }.items()
        }
        self.next_kind = self._(f"SELECT min(kind) FROM {o} WHERE kind > :kind")
        self.count_alarms = self._(
            f"SELECT queue, phase, count(*), min(wake_at) FROM {o} WHERE queue IS NOT NULL GROUP BY queue, phase"
        )
        self.count_objects = self._(
            f"SELECT count(*), count(paused), COALESCE(sum(disabled), 0), COALESCE(sum(sealed), 0) FROM {o}"
        )
        self.count_jobs_of = self._(
            f"SELECT object_id, count(*) FROM {j} WHERE object_id {self._is_in(ids)} AND (id < '#' OR id >= '$')"
            " GROUP BY object_id"
        )
        self.all_jobs_of = self._(
            f"SELECT {job_columns} FROM {j} WHERE object_id = :object ORDER BY {_EFFECTIVE}, id LIMIT :limit"
        )
        self.first_alarm = self._(
            f"SELECT {columns} FROM {o} WHERE queue = :queue AND phase = :phase ORDER BY wake_at LIMIT 1"
        )
        self.first_job = self._(
            f"SELECT id, task, {_EFFECTIVE} FROM {j} WHERE object_id = :object ORDER BY {_EFFECTIVE}, id LIMIT 1"
        )
        self.count_late = self._(
            f"SELECT count(*) FROM (SELECT 1 AS one FROM {o} WHERE queue = :queue AND phase = :phase AND wake_at < :before"
            " LIMIT :limit) AS t"
        )
        self.oldest_job = self._(
            f"SELECT object_id, id, task, queue, {_EFFECTIVE} FROM {j} WHERE {_EFFECTIVE} < :now"
            f" ORDER BY {_EFFECTIVE} LIMIT 1"
        )
        self.newest_dead = self._(
            f"SELECT {dead} FROM {d} WHERE id < :before AND {self._given('reason')} ORDER BY id DESC LIMIT :limit"
        )
        self.newest_dead_of = self._(
            f"SELECT {dead} FROM {d} WHERE kind = :kind AND name = :name AND id < :before AND {self._given('reason')}"
            " ORDER BY id DESC LIMIT :limit"
        )
        self.dead_job = self._(f"SELECT {dead} FROM {d} WHERE id = :id")
        self.storage_keys = self._(
            f"SELECT {key}, length(value) FROM {s} WHERE object_id = :object ORDER BY {key} LIMIT :limit"
        )
        self.version = self._(f"SELECT {'sqlite_version()' if self.dialect == 'sqlite' else 'version()'}")
        self.engines = self._(
            "SELECT table_name, engine FROM information_schema.tables"
            " WHERE table_schema = DATABASE() AND table_name LIKE :pattern"
        )
        self.backend = self._("SELECT pg_backend_pid(), current_setting('lock_timeout')")
        self.limit_statements = {
            "postgresql": ("SET statement_timeout = {ms}",),
            "mysql": ("SET SESSION max_execution_time = {ms}", "SET SESSION max_statement_time = {seconds}"),
        }.get(self.dialect, ())

    def ids(self, ids: list[int]) -> object:
        """A list of ids as the parameter `:ids`."""
        return ids if self.dialect == "postgresql" else "[" + ",".join(map(str, ids)) + "]"

    def _is_in(self, ids: str) -> str:
        return f"= {ids}" if self.dialect == "postgresql" else f"IN {ids}"

    def _given(self, name: str) -> str:
        """A condition on a column that holds for all rows where its parameter is NULL."""
        given = f"CAST(:{name} AS varchar)" if self.dialect == "postgresql" else f":{name}"
        return f"({given} IS NULL OR {name} = :{name})"

    def _quoted(self, name: str) -> str:
        if name != "key":
            return name
        return f"`{name}`" if self.dialect == "mysql" else f'"{name}"'

    def _(self, statement: str) -> str:
        """The statement in the driver's parameter style; sqlite3 takes `:name` itself."""
        if self.dialect == "sqlite":
            return statement
        return re.sub(r"(?<![:\w]):(\w+)", r"%(\1)s", statement)

    def _claimed_update(self, objects: str) -> str:
        """Write what claims change, for many objects at once."""
        names = [name for name in CLAIMED_COLUMNS if name != "id"]
        if self.dialect != "postgresql":
            return f"UPDATE {objects} SET {', '.join(f'{name} = :{name}' for name in names)} WHERE id = :id"
        arrays = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in CLAIMED_COLUMNS.items())
        return (
            f"UPDATE {objects} AS o SET {', '.join(f'{name} = new.{name}' for name in names)}"
            f" FROM unnest({arrays}) AS new({', '.join(CLAIMED_COLUMNS)}) WHERE o.id = new.id"
            # Said twice, so that a small share of a large table is never looked for by reading all of it.
            " AND o.id = ANY(CAST(:id AS bigint[]))"
        )

    def _agenda(self, jobs: str, where: str, now: str) -> str:
        """The time, and the jobs that `Agenda` holds; of one job (`:job`) the whole row, of the others no payload."""
        wanted = [name for name in JOB_COLUMNS if name != "payload"]
        inner = ", ".join(self._quoted(name) for name in wanted)
        outer = ", ".join(
            "CASE WHEN a.id = :job THEN a.payload END AS payload" if name == "payload" else f"a.{self._quoted(name)}"
            for name in JOB_COLUMNS
        )
        return (
            f"SELECT {now}, a.object_id, a.effective, {outer} FROM (SELECT 1 AS one) AS o LEFT JOIN ("
            f"SELECT object_id, payload, {_EFFECTIVE} AS effective, {inner},"
            f" row_number() OVER (PARTITION BY object_id ORDER BY {_EFFECTIVE}, id) AS nth,"
            f" row_number() OVER (PARTITION BY object_id, exclusive ORDER BY {_EFFECTIVE}, id) AS nth_of_kind"
            f" FROM {jobs} WHERE {where}) AS a"
            " ON a.nth <= :length OR (a.exclusive = 1 AND a.nth_of_kind <= :length) OR a.id = :job"
            " OR (a.id >= '#' AND a.id < '$')"
        )

    def _briefs(self, jobs: str, where: str, now: str) -> str:
        """The time, and what `Brief` holds of the jobs that the agendas of many objects hold."""
        brief = "id, version, task, queue, {due}exclusive, options, hung_timeout, singleflight, owner, due_at"
        return (
            f"SELECT {now}, a.object_id, {', '.join('a.' + name for name in brief.format(due='due, ').split(', '))}"
            " FROM (SELECT 1 AS one) AS o LEFT JOIN ("
            f"SELECT object_id, {_EFFECTIVE} AS due, {brief.format(due='')},"
            f" row_number() OVER (PARTITION BY object_id ORDER BY {_EFFECTIVE}, id) AS nth,"
            f" row_number() OVER (PARTITION BY object_id, exclusive ORDER BY {_EFFECTIVE}, id) AS nth_of_kind"
            f" FROM {jobs} WHERE {where}) AS a"
            " ON a.nth <= :length OR (a.exclusive = 1 AND a.nth_of_kind <= :length)"
            " OR (a.id >= '#' AND a.id < '$')"
        )

    def _insert_objects(self, objects: str) -> str:
        """New objects, many at once (PostgreSQL); those that exist are not among the rows that come back."""
        arrays = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in NEW_OBJECT_COLUMNS.items())
        names = ", ".join(NEW_OBJECT_COLUMNS)
        return (
            f"INSERT INTO {objects} ({names}, phase, sent_count, queue_wait, doubt, step, disabled, not_before_count,"
            f" holds, stored, sealed) SELECT {names}, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0"
            f" FROM unnest({arrays}) AS new({names}) ON CONFLICT (kind, name) DO NOTHING RETURNING id, kind, name"
        )

    def _insert_jobs(self, jobs: str) -> str:
        arrays = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in NEW_JOB_COLUMNS.items())
        names = ", ".join(NEW_JOB_COLUMNS)
        return (
            f"INSERT INTO {jobs} ({names}, attempt, strikes) SELECT {names}, 0, 0 FROM unnest({arrays}) AS new({names})"
        )

    def _put_job(self, jobs: str) -> str:
        names = ("object_id", *JOB_COLUMNS)
        columns = ", ".join(self._quoted(name) for name in names)
        insert = f"INSERT INTO {jobs} ({columns}) VALUES ({', '.join(f':j_{name}' for name in names)})"
        changed = [self._quoted(name) for name in JOB_COLUMNS if name != "id"]
        if self.dialect == "mysql":
            return f"{insert} ON DUPLICATE KEY UPDATE {', '.join(f'{n} = VALUES({n})' for n in changed)}"
        return f"{insert} ON CONFLICT (object_id, id) DO UPDATE SET {', '.join(f'{n} = excluded.{n}' for n in changed)}"
