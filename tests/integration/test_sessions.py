"""Pushes in the caller's own transaction: stored and sent if and only if the root commit happens (C24, D06, D19)."""

import asyncio
from collections.abc import Iterator

import pytest
import sqlalchemy
from celery import Celery
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_lifecycle import Lifecycle
from celery_lifecycle.errors import ConfigurationError, LockTimeout, OwnerConflict, TimeInvalid
from celery_lifecycle.model import ObjectRef, Phase
from celery_lifecycle.queue import Push
from tests.support.databases import private_database
from tests.support.protocol import QUEUE, TASK, Clock, Table, check_invariants
from tests.support.tables import make_tables

CART = ObjectRef("cart", "user-42")


class Recorder(Lifecycle):
    """Keeps the chains that would be sent, so that a test can see when."""

    def __init__(self, *args, **kwargs):
        self.sent = []
        self.sends = 0
        super().__init__(*args, **kwargs)

    def send(self, shipments):
        self.sent += [(chain.ref, [job.id for job in chain.jobs]) for chain in shipments]
        self.sends += 1
        return len(shipments)


@pytest.fixture
def lifecycle(database_url: str) -> Iterator[Recorder]:
    made = Recorder(Celery("shop", broker="memory://", set_as_current=False), database_url=database_url, lock_timeout=1)
    make_tables(made.store.database)
    yield made
    check(made)
    made.close()


@pytest.fixture
def engine(database_url: str) -> Iterator[sqlalchemy.Engine]:
    """The caller's own engine, with the settings that SQLAlchemy gives it, and a table of the caller's."""
    made = sqlalchemy.create_engine(database_url)
    with made.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    yield made
    made.dispose()


@pytest.fixture
def cart(lifecycle):
    return lifecycle.object("cart", "user-42")


def check(lifecycle):
    looked = Table.__new__(Table)
    looked.store, looked.config, looked.clock = lifecycle.store, lifecycle.config, Clock()
    check_invariants(looked)


def order(session, number):
    session.execute(sqlalchemy.text("INSERT INTO orders (id) VALUES (:id)"), {"id": number})


def orders(engine):
    with engine.connect() as connection:
        return connection.exec_driver_sql("SELECT count(*) FROM orders").scalar_one()


def ids(lifecycle, ref=CART):
    return [job.id for job in lifecycle.store.jobs.list(ref, None)]


def test_a_rolled_back_push_stores_nothing_and_sends_nothing_and_a_committed_one_does_both(lifecycle, cart, engine):
    """C24"""
    with Session(engine) as session:
        order(session, 1)
        cart.jobs.push(TASK, id="a", session=session)
        session.rollback()
    assert (orders(engine), ids(lifecycle), lifecycle.sent) == (0, [], [])
    assert lifecycle.store.objects.find(CART) is None
    with Session(engine) as session:
        order(session, 1)
        cart.jobs.push(TASK, id="a", session=session)
        assert lifecycle.sent == [], "nothing is sent before the commit"
        session.commit()
    assert (orders(engine), ids(lifecycle)) == (1, ["a"])
    assert lifecycle.sent == [(CART, ["a"])]
    assert lifecycle.store.objects.find(CART).phase is Phase.SENT


def test_a_session_that_is_used_on_sends_each_push_once(lifecycle, cart, engine):
    with Session(engine) as session:
        for number in range(3):
            cart.jobs.push(TASK, id=f"job-{number}", session=session)
            lifecycle.object("cart", f"other-{number}").jobs.push(TASK, id="x", session=session)
            session.commit()
        session.commit()
        order(session, 1)
        session.commit()
    refs = [ref.name for ref, _ in lifecycle.sent]
    assert refs == ["user-42", "other-0", "other-1", "other-2"], "user-42 has its chain on its way"


def test_a_session_closed_without_a_commit_stores_nothing(lifecycle, cart, engine):
    with Session(engine) as session:
        cart.jobs.push(TASK, session=session)
    assert (ids(lifecycle), lifecycle.sent) == ([], [])


def test_nothing_is_claimed_or_sent_at_a_savepoint(lifecycle, cart, engine):
    with Session(engine) as session:
        order(session, 1)
        with session.begin_nested():
            cart.jobs.push(TASK, id="a", session=session)
        assert lifecycle.sent == []
        session.commit()
    assert lifecycle.sent == [(CART, ["a"])]


def test_an_outer_rollback_after_a_released_savepoint_leaves_nothing(lifecycle, cart, engine):
    """D19"""
    with Session(engine) as session:
        order(session, 1)
        with session.begin_nested():
            cart.jobs.push(TASK, id="a", session=session)
        session.rollback()
        order(session, 2)
        session.commit()
    assert (orders(engine), ids(lifecycle), lifecycle.sent) == (1, [], [])
    assert lifecycle.store.objects.find(CART) is None


def test_a_rolled_back_savepoint_takes_its_push_and_leaves_the_others(lifecycle, cart, engine):
    with Session(engine) as session:
        order(session, 1)
        cart.jobs.push(TASK, id="stays", session=session)
        nested = session.begin_nested()
        cart.jobs.push(TASK, id="goes", session=session)
        nested.rollback()
        session.commit()
    assert ids(lifecycle) == ["stays"]
    assert lifecycle.sent == [(CART, ["stays"])]


def test_the_callers_context_manager_commits_at_its_end(lifecycle, cart, engine):
    with Session(engine) as session, session.begin():
        cart.jobs.push(TASK, id="a", session=session)
    assert lifecycle.sent == [(CART, ["a"])]

    def fails():
        with Session(engine) as session, session.begin():
            cart.jobs.push(TASK, id="b", session=session)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert ids(lifecycle) == ["a"]


def test_a_job_for_later_is_stored_and_left_to_beat(lifecycle, cart, engine):
    with Session(engine) as session:
        cart.jobs.push(TASK, id="a", delay=60, session=session)
        session.commit()
    assert (ids(lifecycle), lifecycle.sent) == (["a"], [])


def test_a_push_on_a_bare_connection_is_left_to_beat(lifecycle, cart, engine):
    with engine.connect() as connection:
        cart.jobs.push(TASK, id="a", connection=connection)
        connection.rollback()
        assert ids(lifecycle) == []
        cart.jobs.push(TASK, id="b", connection=connection)
        connection.commit()
    assert (ids(lifecycle), lifecycle.sent) == (["b"], [])
    assert lifecycle.store.claims.claim(QUEUE, Phase.IDLE, 10).rows == 1


def test_many_pushes_of_one_transaction_are_stored_together(lifecycle, cart, engine):
    with Session(engine) as session:
        jobs = cart.jobs.push_many([Push(TASK, id=f"j{n}", delay=n) for n in range(5)], session=session)
        session.rollback()
    assert ids(lifecycle) == []
    with Session(engine) as session:
        cart.jobs.push_many([Push(TASK, id=f"j{n}", delay=n) for n in range(5)], session=session)
        session.commit()
    assert ids(lifecycle) == [job.id for job in jobs]


def test_push_many_of_a_session_leaves_what_is_due_to_beat(lifecycle, cart, engine):
    with Session(engine) as session:
        cart.jobs.push_many([Push(TASK, id=f"j{n}") for n in range(5)], session=session)
        session.commit()
    assert (len(ids(lifecycle)), lifecycle.sent) == (5, [])
    assert lifecycle.store.objects.find(CART).phase is Phase.IDLE


def test_the_pushes_of_a_session_are_sent_together(lifecycle, engine):
    """A broker that does not answer holds the caller's commit once, not once for each object."""
    with Session(engine) as session:
        for number in range(10):
            lifecycle.object("cart", f"cart-{number}").jobs.push(TASK, session=session)
        session.commit()
    assert (len(lifecycle.sent), lifecycle.sends) == (10, 1)


def test_pushes_of_a_session_that_find_the_window_full_are_left_to_beat(database_url, engine, lifecycle):
    narrow = Recorder(
        Celery("narrow", broker="memory://", set_as_current=False), database_url=database_url, dispatch_window=3
    )
    with Session(engine) as session:
        for number in range(10):
            narrow.object("cart", f"cart-{number}").jobs.push(TASK, session=session)
        session.commit()
    assert len(narrow.sent) == narrow.store.claims.count_sent(QUEUE) == 3
    narrow.close()


def test_an_eager_app_sends_no_push_of_a_session(lifecycle, cart, engine):
    lifecycle.app.conf.task_always_eager = True
    with Session(engine) as session:
        cart.jobs.push(TASK, id="a", session=session)
        session.commit()
    assert (ids(lifecycle), lifecycle.sent) == (["a"], [])
    assert lifecycle.store.objects.find(CART).phase is Phase.IDLE


def test_pushes_of_two_lifecycles_in_one_session_are_sent_by_each(lifecycle, cart, engine, database_url):
    other = Recorder(
        Celery("other", broker="memory://", set_as_current=False), database_url=database_url, table_prefix="other_"
    )
    make_tables(other.store.database)
    with Session(engine) as session:
        cart.jobs.push(TASK, id="a", session=session)
        other.object("cart", "user-42").jobs.push(TASK, id="b", session=session)
        session.commit()
    assert (lifecycle.sent, other.sent) == ([(CART, ["a"])], [(CART, ["b"])])
    other.close()


@pytest.mark.databases("postgresql", "mariadb")
def test_a_row_that_somebody_holds_does_not_hold_the_claims_of_a_commit(lifecycle, cart, engine):
    lifecycle.object("cart", "free").jobs.push_many([Push(TASK, id="a")])
    cart.jobs.push_many([Push(TASK, id="a")])
    with Session(engine) as session:
        cart.jobs.push(TASK, id="b", session=session)
        claimed = lifecycle.store.claims.claim_several([CART, ObjectRef("cart", "free")], 1.0)
        assert [str(shipment.ref) for shipment in claimed] == ["cart/free"]
        session.rollback()


def test_a_push_of_an_id_twice_in_one_transaction_replaces_it(lifecycle, cart, engine):
    with Session(engine) as session:
        cart.jobs.push(TASK, id="a", delay=60, session=session)
        second = cart.jobs.push(TASK, id="a", delay=30, session=session)
        session.commit()
    assert second.version == 2
    assert lifecycle.store.objects.find(CART).wake_at == second.due_ms


def test_a_refused_push_leaves_the_callers_transaction_usable(lifecycle, cart, engine):
    cart.jobs.push(TASK, id="taken", delay=60)
    lifecycle.store.jobs.push(
        Table.draft(Table.__new__(Table), "theirs", CART)._replace(owner="mailer", delay_ms=60_000)
    )
    with Session(engine) as session:
        order(session, 1)
        with pytest.raises(OwnerConflict):
            cart.jobs.push(TASK, id="theirs", session=session)
        with pytest.raises(TimeInvalid):
            cart.jobs.push(TASK, delay=-1, session=session)
        cart.jobs.push(TASK, id="fine", delay=5, session=session)
        session.commit()
    assert orders(engine) == 1
    assert set(ids(lifecycle)) == {"taken", "theirs", "fine"}


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.databases("mariadb")
def test_a_caller_with_an_old_snapshot_derives_the_alarm_from_what_is_committed(lifecycle, cart, engine, isolation):
    """D06: another client commits a job due earlier after the caller's snapshot was taken."""
    with Session(engine.execution_options(isolation_level=isolation)) as session:
        assert session.execute(sqlalchemy.text("SELECT count(*) FROM lifecycle_jobs")).scalar_one() == 0
        earlier = cart.jobs.push(TASK, id="earlier", delay=60)
        cart.jobs.push(TASK, id="later", delay=600, session=session)
        session.commit()
    found = lifecycle.store.objects.find(CART)
    assert found.wake_at == earlier.due_ms
    assert found.versions == 2


@pytest.mark.databases("mariadb")
def test_a_caller_with_an_old_snapshot_replaces_the_job_that_is_there_now(lifecycle, cart, engine):
    """D06, for the job itself: owner, version and strikes are read as they are committed."""
    with Session(engine.execution_options(isolation_level="REPEATABLE READ")) as session:
        session.execute(sqlalchemy.text("SELECT count(*) FROM lifecycle_jobs"))
        cart.jobs.push(TASK, id="a", delay=60)
        new = cart.jobs.push(TASK, id="a", delay=600, session=session)
        session.commit()
    assert (new.version, ids(lifecycle)) == (2, ["a"])
    assert lifecycle.store.objects.find(CART).wake_at == new.due_ms


@pytest.mark.databases("postgresql")
def test_above_read_committed_the_whole_transaction_is_the_callers_to_repeat(lifecycle, cart, engine):
    cart.jobs.push(TASK, id="a", delay=60)
    with Session(engine.execution_options(isolation_level="REPEATABLE READ")) as session:
        session.execute(sqlalchemy.text("SELECT 1 FROM orders"))
        cart.jobs.push(TASK, id="b", delay=30)
        with pytest.raises(Exception, match=r"serialize"):
            cart.jobs.push(TASK, id="c", delay=600, session=session)
        session.rollback()
        cart.jobs.push(TASK, id="c", delay=600, session=session)
        session.commit()
    assert ids(lifecycle) == ["b", "a", "c"]


def test_an_open_transaction_of_a_caller_holds_its_object_and_the_error_says_so(lifecycle, cart, engine):
    """The lock timeout of our own transactions names the object and the likely cause."""
    with Session(engine) as session:
        cart.jobs.push(TASK, id="a", session=session)
        with pytest.raises(LockTimeout, match=r"commit") as caught:
            cart.jobs.push(TASK, id="b")
        if engine.dialect.name != "sqlite":
            assert "cart/user-42" in str(caught.value)
            lifecycle.object("cart", "other").jobs.push(TASK, id="free")
        session.rollback()
    cart.jobs.push(TASK, id="b")
    assert ids(lifecycle) == ["b"]


@pytest.mark.databases("postgresql", "mariadb")
def test_callers_with_new_objects_in_open_transactions_neither_wait_for_each_other_nor_for_us(lifecycle, engine):
    """On MariaDB in its default isolation too: no gap is locked that somebody else inserts into."""
    with Session(engine) as one, Session(engine) as two:
        lifecycle.object("cart", "m").jobs.push(TASK, id="a", delay=60, session=one)
        lifecycle.object("cart", "a").jobs.push(TASK, id="a", delay=60, session=two)
        lifecycle.object("cart", "z").jobs.push(TASK, id="a", delay=60)
        lifecycle.object("cart", "k").jobs.push(TASK, id="a", delay=60)
        lifecycle.object("cart", "l").jobs.push(TASK, id="a", delay=60, session=one)
        lifecycle.object("cart", "b").jobs.push(TASK, id="a", delay=60, session=two)
        one.commit()
        two.commit()
    assert lifecycle.store.jobs.get(ObjectRef("cart", "b"), "a", None) is not None


@pytest.mark.databases("postgresql", "mariadb")
def test_a_caller_that_pushes_to_an_object_that_is_there_keeps_nobody_from_making_its_neighbours(lifecycle, engine):
    lifecycle.object("cart", "m").jobs.push(TASK, id="a", delay=60)
    lifecycle.object("cart", "zz").jobs.push(TASK, id="a", delay=60)
    with Session(engine) as session:
        lifecycle.object("cart", "m").jobs.push(TASK, id="b", delay=60, session=session)
        for name in ("l", "mm", "n"):
            lifecycle.object("cart", name).jobs.push(TASK, id="a", delay=60)
        session.commit()


@pytest.mark.databases("sqlite")
def test_a_session_of_another_kind_of_database_is_refused(lifecycle, cart):
    other = sqlalchemy.create_engine("postgresql+psycopg://127.0.0.1/none")

    class Elsewhere:
        dialect = other.dialect

    with pytest.raises(ConfigurationError, match=r"postgresql.*sqlite.*one database"):
        cart.jobs.push(TASK, connection=Elsewhere())
    other.dispose()


def test_a_session_of_another_database_of_the_same_kind_is_refused(lifecycle, cart, tmp_path, database):
    (tmp_path / "other").mkdir()
    with private_database(database.kind, tmp_path / "other") as theirs:
        other = Recorder(Celery("other", broker="memory://", set_as_current=False), database_url=theirs.url)
        elsewhere = sqlalchemy.create_engine(theirs.url)
        with Session(elsewhere) as session:
            with pytest.raises(ConfigurationError, match=r"both are one database"):
                cart.jobs.push(TASK, session=session)
            session.rollback()
            make_tables(other.store.database)
            with pytest.raises(ConfigurationError, match=r"both are one database"):
                cart.jobs.push(TASK, session=session)
            session.commit()
        assert ids(other) == ids(lifecycle) == []
        elsewhere.dispose()
        other.close()


@pytest.mark.databases("sqlite")
def test_a_session_in_the_job_databases_file_by_another_path_is_taken(lifecycle, cart, tmp_path, database):
    (tmp_path / "link.db").symlink_to(database.name)
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/link.db")
    with Session(engine) as session:
        cart.jobs.push(TASK, id="a", session=session)
        session.commit()
    assert ids(lifecycle) == ["a"]
    engine.dispose()


def test_a_session_without_a_transaction_is_refused(lifecycle, cart, database_url):
    engine = sqlalchemy.create_engine(database_url, isolation_level="AUTOCOMMIT")
    with Session(engine) as session, pytest.raises(ConfigurationError, match=r"AUTOCOMMIT"):
        cart.jobs.push(TASK, delay=60, session=session)
    with engine.connect() as connection, pytest.raises(ConfigurationError, match=r"AUTOCOMMIT"):
        cart.jobs.push(TASK, delay=60, connection=connection)
    assert ids(lifecycle) == []
    engine.dispose()


@pytest.mark.databases("sqlite")
def test_a_session_whose_transactions_are_begun_by_hand_is_taken(lifecycle, cart, engine):
    """What SQLAlchemy's documentation advises for savepoints with SQLite."""

    @sqlalchemy.event.listens_for(engine, "connect")
    def connect(connection, record):
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection):
        connection.exec_driver_sql("BEGIN")

    engine.dispose()
    with Session(engine) as session:
        cart.jobs.push(TASK, id="a", session=session)
        session.rollback()
        cart.jobs.push_many([Push(TASK, id="b"), Push(TASK, id="c")], session=session)
        session.rollback()
        cart.jobs.push(TASK, id="d", session=session)
        session.commit()
    assert ids(lifecycle) == ["d"]


def test_push_many_of_a_session_stores_all_or_none(lifecycle, cart, engine):
    """What the caller wrote before stays, and his transaction can be used on."""
    lifecycle.store.jobs.push(
        Table.draft(Table.__new__(Table), "theirs", CART)._replace(owner="mailer", delay_ms=60_000)
    )
    with Session(engine) as session:
        pushes = [Push(TASK, id="a"), Push(TASK, id="theirs"), Push(TASK, id="b")]
        with pytest.raises(OwnerConflict):
            cart.jobs.push_many(pushes, session=session)
        order(session, 1)
        with pytest.raises(OwnerConflict):
            cart.jobs.push_many(pushes, session=session)
        cart.jobs.push(TASK, id="c", session=session)
        session.commit()
    assert (orders(engine), set(ids(lifecycle))) == (1, {"theirs", "c"})
    with Session(engine) as session:
        cart.jobs.push_many([Push(TASK, id="d"), Push(TASK, id="e")], session=session)
        session.rollback()
    assert set(ids(lifecycle)) == {"theirs", "c"}


def test_a_scoped_session_is_the_session_of_its_scope(lifecycle, cart, engine):
    scoped = scoped_session(sessionmaker(engine))
    cart.jobs.push(TASK, id="a", session=scoped)
    scoped.commit()
    assert lifecycle.sent == [(CART, ["a"])]
    scoped.remove()


@pytest.mark.databases("postgresql")
def test_an_asynchronous_session_is_used_through_run_sync(lifecycle, cart, database_url):
    async def use():
        engine = create_async_engine(database_url)
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigurationError, match=r"await session\.run_sync"):
                cart.jobs.push(TASK, session=session)
            async with engine.connect() as connection:
                with pytest.raises(ConfigurationError, match=r"await session\.run_sync"):
                    cart.jobs.push(TASK, connection=connection)
            await session.run_sync(lambda sync: cart.jobs.push(TASK, id="a", delay=60, session=sync))
            await session.run_sync(
                lambda sync: cart.jobs.push_many([Push(TASK, id=f"b{n}", delay=90 + n) for n in range(3)], session=sync)
            )
            await session.run_sync(
                lambda sync: lifecycle.object("cart", "new").jobs.push_many(
                    [Push(TASK, id=f"c{n}", delay=90) for n in range(3)], session=sync
                )
            )
            await session.commit()
        await engine.dispose()

    asyncio.run(use())
    assert ids(lifecycle) == ["a", "b0", "b1", "b2"]
    assert ids(lifecycle, ObjectRef("cart", "new")) == ["c0", "c1", "c2"]


def test_what_a_caller_wrote_outside_the_orm_is_committed_with_the_push(lifecycle, cart, engine):
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO orders (id) VALUES (7)")
        cart.jobs.push(TASK, id="a", delay=60, connection=connection)
    assert (orders(engine), ids(lifecycle)) == (1, ["a"])


def test_a_cancelled_objects_row_that_a_caller_made_anew_is_one_row(lifecycle, cart, engine):
    cart.jobs.push(TASK, id="a", delay=60)
    cart.jobs.cancel("a")
    with Session(engine) as session:
        cart.jobs.push(TASK, id="b", delay=60, session=session)
        session.commit()
    assert ids(lifecycle) == ["b"]
