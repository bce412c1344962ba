"""What clients do: jobs, switches, the bare alarm, storage, dead jobs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from celery_lifecycle.errors import LifecycleError, ObjectDisabled, OwnerConflict
from celery_lifecycle.model import Why
from celery_lifecycle.store.jobs import Draft as StoredDraft
from celery_lifecycle.store.jobs import Pusher
from celery_lifecycle.timing.spec import ScheduleSpec
from tests.property.store_model.actions import action, often
from tests.property.store_model.machine import ALARM_TASK, IDS, KIND, NAMES, OTHER, QUEUES, TASK, Beside
from tests.property.store_model.model import ALARM, SECOND, Job
from tests.property.store_model.plan import Plan, woken
from tests.property.store_model.world import Dead, Draft, Inside, Refused

PLANS = (
    Plan("every", 30 * SECOND, "run_once"), Plan("every", 30 * SECOND, "skip"), Plan("grid", 40 * SECOND, "run_once"),
    Plan("grid", 40 * SECOND, "skip"), Plan("once", 10 * SECOND, "skip"),
)  # fmt: skip
MOST_JOBS = 4
"""Pending at once, beside those of the ids that all rules use."""


names = often("x", "y", "a", times=2)
drafts = st.builds(
    Draft, id=st.sampled_from(IDS), task=often(TASK, OTHER), owner=often("host", "cap"), queue=often(*QUEUES),
    delay=st.sampled_from([0, 0, 0, 0, 5, 40]).map(lambda seconds: seconds * SECOND),
    exclusive=often(False, True), recovery=often(False, True), most_attempts=often(3, 1),
    expires=often(None, 2),
)  # fmt: skip


def spec_of(plan: Plan) -> ScheduleSpec:
    kind = "delayed" if plan.kind == "once" else "interval"
    return ScheduleSpec(kind, seconds=plan.every / SECOND, fixed_rate=plan.kind == "grid", misfire=plan.misfire)  # type: ignore[arg-type]


class Clients(Beside):
    """Anyone may change an object at any time."""

    @initialize(ids=st.sampled_from([("a", "b", "c"), ("a", "b"), ("a", "b"), ()]), name=names)
    def begin_with(self, ids: tuple[str, ...], name: str) -> None:
        """Most stories are about chains of several links."""
        for job_id in ids:
            self.store(name, Draft(job_id), None, job_id == ids[-1])

    def stored_draft(self, name: str, draft: Draft) -> StoredDraft:
        options = None if draft.expires is None else f'{{"expires_ms": {draft.expires}}}'
        return StoredDraft(
            self.ref(name), draft.task, draft.queue, draft.owner, draft.payload, draft.id, delay_ms=draft.delay,
            options_json=options, retry_json=f"[{draft.most_attempts}, 0.1, 3.0]", exclusive=draft.exclusive,
            schedule=spec_of(draft.plan) if draft.plan else None, recovery_loop=draft.recovery, keep=draft.keep,
            alike=draft.alike,
        )  # fmt: skip

    def store(self, name: str, draft: Draft, inside: Inside | None, claims: bool) -> None:
        """Push a job; the store and the model make the same of it."""
        thing = self.things.get(name)
        if thing is not None and draft.id is None and len(list(thing.user_jobs())) >= MOST_JOBS:
            return
        if draft.expires is not None:
            draft = replace(draft, expires=self.now + draft.expires * SECOND)
        pusher = Pusher(self.ref(inside.name), inside.line, inside.task, inside.line) if inside else None
        error, told, new_id = "", "", ""
        try:
            pushed = self.table.store.jobs.push(self.stored_draft(name, draft), pusher, claims)
            new_id = pushed.job.id
        except (ObjectDisabled, OwnerConflict) as refused:
            error = type(refused).__name__
        try:
            job, what = self.world.push(name, draft, inside, new_id)
        except Refused as refused:
            told = str(refused)
        assert error == told
        if error:
            self.hit(f"push: {error}")
            return
        assert (pushed.job.id, pushed.job.sealed) == (job.id, what == "sealed")
        self.hit(f"push{' from inside' if inside else ''}: {what}")
        if what != "new":
            assert pushed.shipment is None
            return
        thing = self.things[name]
        chain = thing.dispatch(self.now) if claims and thing.run is None and thing.sent is None else None
        self.saved(thing)
        self.shipped(thing, chain, pushed.shipment)

    @action(5, name=names, draft=drafts, claims=st.booleans())
    def push(self, name: str, draft: Draft, claims: bool) -> None:
        self.store(name, draft, None, claims)

    @action(2, name=names, draft=drafts, claims=st.booleans(), without_id=st.booleans())
    def push_idempotently(self, name: str, draft: Draft, claims: bool, without_id: bool) -> None:
        self.store(name, replace(draft, id=None if without_id else draft.id, keep=not without_id), None, claims)

    @action(3,
        name=names, job_id=st.sampled_from(IDS), plan=st.sampled_from(PLANS), task=often(TASK, OTHER),
        keep=st.sampled_from(["", "keep", "alike", "alike"]), exclusive=often(False, True),
    )  # fmt: skip
    def schedule(self, name: str, job_id: str, plan: Plan, task: str, keep: str, exclusive: bool) -> None:
        draft = Draft(job_id, task, plan=plan, keep=bool(keep), alike=keep == "alike", exclusive=exclusive)
        self.store(name, draft, None, True)

    @action(4, when=lambda self: self.playing,
        job_id=st.sampled_from([*IDS, None]), delay=st.sampled_from([0, 5]), keep=st.booleans(),
        task=often(None, OTHER), elsewhere=often(None, *NAMES),
    )  # fmt: skip
    def push_from_inside(
        self, data: st.DataObject, job_id: str | None, delay: int, keep: bool, task: str | None, elsewhere: str | None
    ) -> None:
        """A running job pushes, to its own object or to another one; in flight still or not."""
        running = data.draw(st.sampled_from(self.playing))
        job = running.begun.job
        if job is None or running.starting:
            return
        inside = Inside(running.name, job.task, job.line)
        draft = Draft(job_id, task or job.task, delay=delay * SECOND, keep=keep and job_id is not None)
        self.store(elsewhere or running.name, draft, inside, False)

    @action(
        3, when=lambda self: self.playing and any(one.reason == "sealed" for one in self.world.dead), keep=st.booleans()
    )
    def a_sealed_job_is_pushed_from_inside(self, data: st.DataObject, keep: bool) -> None:
        """It stays away, whichever object the job runs for that wants it back."""
        dead = data.draw(st.sampled_from([one for one in self.world.dead if one.reason == "sealed"]))
        running = data.draw(st.sampled_from(self.playing))
        job = running.begun.job
        if job is not None and not running.starting:
            draft = Draft(dead.job.id, dead.job.task, dead.job.owner, keep=keep)
            self.store(dead.name, draft, Inside(running.name, job.task, job.line), False)

    @action(1, many=st.lists(st.tuples(names, drafts), min_size=2, max_size=4))
    def push_many(self, many: list[tuple[str, Draft]]) -> None:
        """All or none of them are stored; what is due is left to beat."""
        many = [(name, replace(draft, expires=None)) for name, draft in many]
        before, error, refusal = self.world.copied(), "", ""
        pushed = []
        try:
            pushed = self.table.store.jobs.push_many([self.stored_draft(*one) for one in many])
        except (ObjectDisabled, OwnerConflict) as refused:
            error = type(refused).__name__
        stored: dict[int, Job] = {}
        try:
            for place in sorted(range(len(many)), key=lambda place: many[place][0]):
                name, draft = many[place]
                stored[place], _ = self.world.push(name, draft, None, "")
                self.saved(self.things[name])
        except Refused as refused:
            refusal = str(refused)
        assert error == refusal
        if error:
            self.world = before
            self.hit("push_many: refused")
            return
        assert [job.id for job in pushed] == [stored[place].id for place in range(len(many))]
        self.hit("push_many: accepted")

    @action(2,
        name=names, job_id=st.sampled_from([*IDS, ALARM]), owner=often("host", "cap", None),
        revoked=st.booleans(),
    )  # fmt: skip
    def cancel(self, name: str, job_id: str, owner: str | None, revoked: bool) -> None:
        gone = self.table.store.jobs.cancel(self.ref(name), job_id, owner, Why.REVOKED if revoked else None)
        thing = self.things.get(name)
        job = thing.jobs.get(job_id) if thing else None
        mine = job is not None and owner in (None, job.owner)
        assert (gone is not None) == mine
        self.either("cancel", mine)
        if thing is not None and job is not None and mine:
            thing.look()
            del thing.jobs[job_id]
            if revoked:
                self.world.bury(thing, job, "revoked")
            self.saved(thing)

    @action(1, when=lambda self: "a" in self.things, running=st.booleans())
    def revoke_by_task_id(self, running: bool) -> None:
        """The job whose task id a caller holds: its object has the name of the job."""
        gone = self.table.store.jobs.revoke([KIND, "other"], "a", running)
        thing = self.things.get("a")
        job = thing.jobs.get("a") if thing else None
        runs = thing is not None and thing.run is not None and thing.run.flight is not None
        mine = job is not None and (running or not runs)
        assert (gone is not None) == mine
        self.either("revoke", mine)
        if thing is not None and job is not None and mine:
            thing.look()
            del thing.jobs["a"]
            self.world.bury(thing, job, "revoked")
            self.saved(thing)

    @action(2,
        name=names, job_id=st.sampled_from(IDS), owner=often("host", "cap"), delay=st.sampled_from([0, 15])
    )  # fmt: skip
    def reschedule(self, name: str, job_id: str, owner: str, delay: int) -> None:
        moved = self.table.store.jobs.reschedule(self.ref(name), job_id, owner, None, delay * SECOND)
        thing = self.things.get(name)
        job = thing.jobs.get(job_id) if thing else None
        mine = job is not None and job.owner == owner
        assert (moved is not None) == mine
        self.either("reschedule", mine)
        if thing is not None and job is not None and mine:
            thing.look(job_id)
            job.due, job.version, job.attempt = self.now + delay * SECOND, thing.next_version(), 0
            job.unknown_since = None
            self.saved(thing)

    @action(4, when=lambda self: self.playing, how=st.sampled_from(["push", "reschedule", "cancel"]))
    def a_job_is_changed_while_it_runs(self, data: st.DataObject, how: str) -> None:
        """Its outcome is discarded; the bare alarm that is set while it runs stands."""
        playing = data.draw(st.sampled_from(self.playing))
        job = playing.begun.job
        if playing.begun.alarm:
            self.set_alarm(playing.name, 0)
        elif job is None or playing.is_hook:
            return
        elif how == "push":
            self.store(playing.name, Draft(job.id, job.task, job.owner), None, False)
        elif how == "reschedule":
            self.reschedule(playing.name, job.id, job.owner, 0)
        else:
            self.cancel(playing.name, job.id, None, False)

    # --- switches

    @action(
        3,
        name=names,
        switch=st.sampled_from(["pause"] * 3 + ["resume"] * 6 + ["destroy"] * 3 + ["rearm", "disable"]),
    )
    def switch(self, name: str, switch: str) -> None:
        {
            "pause": self._pause, "resume": self._resume, "destroy": self._destroy, "rearm": self._rearm,
            "disable": self._disable,
        }[switch](name)  # fmt: skip

    def _pause(self, name: str) -> None:
        self.table.store.objects.pause(self.ref(name), "holiday")
        thing = self.made(name)
        thing.paused = thing.paused or "holiday"
        self.hit("pause")
        self.saved(thing)

    def _disable(self, name: str) -> None:
        self.table.store.objects.disable(self.ref(name))
        thing = self.made(name)
        thing.disabled = True
        self.hit("disable")
        self.saved(thing)

    def _rearm(self, name: str) -> None:
        self.table.store.jobs.rearm(self.ref(name))
        if name in self.things:
            self.saved(self.things[name])
            self.hit("rearm")

    def _resume(self, name: str) -> None:
        known = self.table.store.objects.resume(self.ref(name))
        thing = self.things.get(name)
        assert known == (thing is not None)
        if thing is None:
            return
        self.hit(f"resume: {thing.paused or 'not paused'}")
        if thing.sealed:
            self.world.lift_all(name)
        thing.paused, thing.sealed, thing.lines, thing.not_before, thing.failures = None, False, {}, None, 0
        for job in list(thing.jobs.values()):
            job.acquit()
        # In which order they are moved on is for the store to say.
        order = {job.id: job.version for job in self.table.store.jobs.list(self.ref(name), None)}
        for job in sorted(thing.jobs.values(), key=lambda job: order.get(job.id, 0)):
            running = thing.run is not None and thing.run.flight is not None and thing.run.flight.job == job.id
            if job.plan is None or job.due > self.now or running:
                continue
            found = woken(job.plan, job.due, job.unknown_since is not None, job.attempt, self.now)
            if not found.runs:
                self.world.woken(thing, job, found)
                self.hit("resume: a missed occurrence is dropped")
        self.saved(thing)

    def _destroy(self, name: str) -> None:
        known = self.table.store.objects.destroy(self.ref(name))
        thing = self.things.get(name)
        assert known == (thing is not None)
        if thing is None:
            return
        if thing.sealed:
            self.world.lift_all(name)
        self.world.holds = {key: hold for key, hold in self.world.holds.items() if hold.name != name}
        self.things[name] = thing.destroy()
        self.hit("destroy" if self.things[name].run is None else "destroy: a link in flight goes on")
        self.saved(self.things[name])

    # --- the bare alarm, storage

    @action(1, name=names, delay=st.sampled_from([0, 0, 8]))
    def set_alarm(self, name: str, delay: int) -> None:
        error, thing = False, self.made(name)
        try:
            self.table.store.objects.set_alarm(self.ref(name), ALARM_TASK, QUEUES[0], None, delay * SECOND)
        except ObjectDisabled:
            error = True
        assert error == thing.disabled
        self.either("set_alarm", not error)
        if not error:
            suspect = thing.jobs[ALARM].suspect if ALARM in thing.jobs else None
            job = thing.own_job(ALARM, ALARM_TASK, QUEUES[0], self.now, self.now + delay * SECOND)
            job.suspect = suspect
            self.saved(thing)

    @action(1, name=names)
    def get_alarm(self, name: str) -> None:
        """None while it runs, unless it was set again."""
        found = self.table.store.jobs.get_alarm(self.ref(name))
        thing = self.things.get(name)
        alarm = thing.jobs.get(ALARM) if thing else None
        if alarm is not None and thing is not None and thing.run is not None and thing.run.flight is not None:
            flight = thing.run.flight
            if (flight.job, flight.version) == (ALARM, alarm.version):
                self.hit("get_alarm: while it runs")
                alarm = None
        assert (found.due_ms if found else None) == (alarm.due if alarm else None)

    @action(1,
        name=names, values=st.dictionaries(st.sampled_from("kl"), st.sampled_from(["1", None]), min_size=1)
    )  # fmt: skip
    def put_values(self, name: str, values: dict[str, str | None]) -> None:
        self.table.store.objects.put_values(self.ref(name), dict(values))
        if name in self.things or any(value is not None for value in values.values()):
            thing = self.made(name)
            self.write(thing, values)
            self.hit("storage from outside")
            self.saved(thing)

    # --- dead jobs

    @action(2, when=lambda self: self.world.dead, what=st.sampled_from(["replay", "replay", "purge"]))
    def use_a_dead_job(self, data: st.DataObject, what: str) -> None:
        dead = data.draw(st.sampled_from(self.world.dead))
        if what == "purge":
            self._purge(dead)
        else:
            self._replay(dead)

    def _purge(self, dead: Dead) -> None:
        assert self.table.store.dead.purge(dead.key or 0)
        assert not self.table.store.dead.purge(dead.key or 0)
        self.purged(dead)
        self.hit(f"purge: {'a seal' if dead.reason == 'sealed' else 'another'}")

    def _replay(self, dead: Dead) -> None:
        name, old = dead.name, dead.job
        thing = self.things.get(name)
        if thing is not None and len(list(thing.user_jobs())) >= MOST_JOBS:
            return
        thing = self.made(name)
        taken = old.id in thing.jobs
        try:
            job = self.table.store.dead.replay(dead.key or 0)
        except LifecycleError:
            assert thing.disabled
            self.hit("replay: refused")
            return
        assert job is not None
        assert not thing.disabled
        again = replace(
            old, id=f"{old.id}-replay-{dead.key}" if taken and not old.id.startswith("#") else old.id, line=old.id,
            version=thing.next_version(), due=self.now, not_before=None, attempt=0, strikes=0, suspect=None,
            unknown_since=None, expires=None,
        )  # fmt: skip
        if taken and again.plan is not None:
            again.plan = again.plan.occurrence()
        thing.look(again.id)
        thing.jobs[again.id] = again
        if (
            not taken or old.id == ALARM
        ):  # it begins with nothing counted; the deaths of one that took its id are not its own
            thing.clear_deaths(old.line, old.id)
        self.world.dead.remove(dead)
        thing.sealed = bool(self.world.seals(name))
        self.saved(thing)
        self.hit(f"replay: {dead.reason}")
