"""Pushes in the caller's own transaction: the job exists if and only if the caller commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, scoped_session

from celery_lifecycle import events
from celery_lifecycle.deployment import Deployment, current_run
from celery_lifecycle.errors import ConfigurationError, LifecycleError
from celery_lifecycle.model import Job, ObjectRef
from celery_lifecycle.store.database import Tx
from celery_lifecycle.store.jobs import Draft

_KEY = "celery_lifecycle"
_HOMES = "celery_lifecycle.homes"
SEND_FOR = 1.0


class _Pending:
    """What a session has pushed and not yet committed: per deployment the objects to send, and the queues they go to."""

    def __init__(self) -> None:
        self.refs: dict[Deployment, dict[ObjectRef, str]] = {}
        self.root_commit = False


def push_in_session(
    deployment: Deployment, session: Session | scoped_session[Any], drafts: Sequence[Draft], sends: bool = True
) -> list[Job]:
    """Store drafts in the session's transaction; what is due is claimed and sent after its root commit.

    `sends`: if not, all of it is left to beat.
    """
    _refuse_async(session)
    if isinstance(session, scoped_session):
        session = session()
    connection = session.connection()
    jobs = push_in_connection(deployment, connection, drafts)
    if not sends:
        return jobs
    pending = session.info.get(_KEY)
    if pending is None:
        pending = session.info[_KEY] = _Pending()
        event.listen(session, "after_commit", _after_commit)
    if _KEY not in connection.info or connection.info[_KEY] is not pending:
        connection.info[_KEY] = pending
    _listen(connection)
    pending.root_commit = False
    for draft in drafts:
        if draft.due_at_once:
            pending.refs.setdefault(deployment, {})[draft.ref] = draft.queue
    return jobs


def push_in_connection(deployment: Deployment, connection: Connection, drafts: Sequence[Draft]) -> list[Job]:
    """Store drafts in the transaction of a SQLAlchemy connection; beat sends them. All are stored, or none.

    Raises:
        ConfigurationError: it is of another database, or not in a transaction.
    """
    _refuse_async(connection)
    database = deployment.store.database
    if connection.dialect.name.replace("mariadb", "mysql") != database.sql.dialect:
        raise ConfigurationError(
            f"The session or connection is of {connection.dialect.name}, the job database is of {database.sql.dialect}: "
            "a push can be part of your transaction only where both are one database."
        )
    dbapi = connection.connection.dbapi_connection
    if dbapi is None or not hasattr(dbapi, "cursor"):
        raise LifecycleError("The session's connection is closed: push before it is.")
    if not connection.in_transaction():
        connection.begin()
    if _is_autocommit(dbapi):
        raise ConfigurationError(
            "The session or connection is in AUTOCOMMIT mode, in which every statement is a transaction of its own: what is"
            " pushed could not be rolled back. Use one with another isolation level, or push without session= and connection=."
        )
    run = current_run()
    with database.within(dbapi, connection.dialect) as tx:
        _check_home(deployment, connection, tx)
        pusher = run.pusher if run else None
        if len(drafts) == 1:
            return [deployment.store.jobs.push_in(tx, drafts[0], pusher).job]
        with tx.savepoint():
            return deployment.store.jobs.push_many_in(tx, drafts, pusher)


def _refuse_async(given: Any) -> None:
    if hasattr(given, "run_sync"):
        kind = type(given).__name__
        raise ConfigurationError(
            f"{kind} is asynchronous, and a push is not. Write:"
            " `await session.run_sync(lambda sync: cart.jobs.push(…, session=sync))`."
        )


def _is_autocommit(dbapi: Any) -> bool:
    """Whether statements are committed one by one, as the driver's connection says."""
    if hasattr(dbapi, "get_autocommit"):  # MySQL's drivers, whose `autocommit` sets it
        return bool(dbapi.get_autocommit())
    if hasattr(dbapi, "isolation_level") and hasattr(dbapi, "in_transaction"):
        # sqlite3. Where None is set to begin transactions by hand, as SQLAlchemy's documentation advises, one has begun.
        return dbapi.isolation_level is None and not dbapi.in_transaction
    return getattr(dbapi, "autocommit", False) is True


def _check_home(deployment: Deployment, connection: Connection, tx: Tx) -> None:
    """Once for each connection that the caller's pool makes: is it to the job database?"""
    store = deployment.store
    home = (store.database.url, store.database.sql.prefix)
    known = connection.info.setdefault(_HOMES, set())
    if home in known:
        return
    if not store.beats.is_home_of(tx, deployment.database_id):
        theirs = connection.engine.url.render_as_string(hide_password=True)
        raise ConfigurationError(
            f"The session or connection is of {theirs}, the job database is"
            f" {store.database.url.render_as_string(hide_password=True)}: a push can be part of your transaction only where"
            " both are one database."
        )
    known.add(home)


def _listen(connection: Connection) -> None:
    """Hear of the commit or rollback that the driver is told of: savepoints have none."""
    for name, heard in (
        ("commit", _on_driver_commit),
        ("commit_twophase", _on_driver_commit),
        ("rollback", _on_driver_rollback),
        ("rollback_twophase", _on_driver_rollback),
    ):
        if not event.contains(connection, name, heard):
            event.listen(connection, name, heard)


def _on_driver_commit(connection: Connection, *rest: Any) -> None:
    pending = connection.info.get(_KEY)
    if isinstance(pending, _Pending):
        pending.root_commit = True


def _on_driver_rollback(connection: Connection, *rest: Any) -> None:
    pending = connection.info.get(_KEY)
    if isinstance(pending, _Pending):
        pending.refs.clear()


def _after_commit(session: Session) -> None:
    pending = session.info.get(_KEY)
    if not isinstance(pending, _Pending) or not pending.root_commit:
        return
    refs, pending.refs, pending.root_commit = pending.refs, {}, False
    for deployment, its in refs.items():
        _send(deployment, its)


def _send(deployment: Deployment, refs: dict[ObjectRef, str]) -> None:
    """The caller's commit is done, and must not be held: whatever fails now, or takes long, is left to beat."""
    try:
        fitting = [ref for ref, queue in refs.items() if deployment.has_room(queue)]
        shipments = deployment.store.claims.claim_several(fitting, SEND_FOR) if fitting else []
        if shipments:
            deployment.send(shipments)
    except LifecycleError as error:
        told = f"{next(iter(refs))}" if len(refs) == 1 else f"{len(refs)} objects"
        events.database_failed(f"{told} had a job stored, but could not be sent at once; beat will", error)
