"""Pushes in the caller's own transaction: the job exists if and only if the caller commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session

from celery_lifecycle import events
from celery_lifecycle.deployment import Deployment, current_run
from celery_lifecycle.errors import ConfigurationError, LifecycleError
from celery_lifecycle.model import Job, ObjectRef
from celery_lifecycle.store.jobs import Draft

_KEY = "celery_lifecycle"
SEND_FOR = 1.0


class _Pending:
    """What a session has pushed and not yet committed: per deployment the objects to send, and the queues they go to."""

    def __init__(self) -> None:
        self.refs: dict[Deployment, dict[ObjectRef, str]] = {}
        self.root_commit = False


def push_in_session(deployment: Deployment, session: Session, drafts: Sequence[Draft], sends: bool = True) -> list[Job]:
    """Store drafts in the session's transaction; what is due is claimed and sent after its root commit.

    `sends`: if not, all of it is left to beat.
    """
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
    """Store drafts in the transaction of a SQLAlchemy connection; beat sends them."""
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
    run = current_run()
    with database.within(dbapi, connection.dialect) as tx:
        pusher = run.pusher if run else None
        if len(drafts) == 1:
            return [deployment.store.jobs.push_in(tx, drafts[0], pusher).job]
        return deployment.store.jobs.push_many_in(tx, drafts, pusher)


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
