"""The pages: a list of objects, one object, dead jobs; and what a person may change from there."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from flower import urls
from flower.views import BaseHandler
from tornado.template import DictLoader
from tornado.web import HTTPError, RequestHandler, authenticated, url

from celery_lifecycle import describe, events, validate
from celery_lifecycle.errors import DatabaseUnavailable, LifecycleError, NameInvalid, SchemaOutdated
from celery_lifecycle.lifecycle import Lifecycle
from celery_lifecycle.model import ObjectRef, Why
from celery_lifecycle.store.database import Database
from celery_lifecycle.store.watch import FILTERS, Overview, Watch

T = TypeVar("T")

TEMPLATES = Path(__file__).with_name("templates")
PER_PAGE = 100
COUNTED_FOR = 5.0
BEAT_IS_LATE_MS = 5000
REASONS = tuple(why.value for why in Why)


def install(lifecycle: Lifecycle) -> None:
    """Add the pages and a link to them to the Flower of this process."""
    desk = {"desk": Desk(lifecycle)}
    urls.handlers[:0] = [
        url(r"/lifecycle", ObjectsPage, desk, name="lifecycle"),
        url(r"/lifecycle/", ObjectsPage, desk),
        url(r"/lifecycle/object", ObjectPage, desk, name="lifecycle_object"),
        url(r"/lifecycle/dead", DeadPage, desk, name="lifecycle_dead"),
        url(r"/lifecycle/do", Action, desk, name="lifecycle_do"),
    ]
    urls.settings["template_loader"] = DictLoader(_templates(Path(urls.settings["template_path"])))


def _templates(of_flower: Path) -> dict[str, str]:
    """Flower's templates, with one more link in the navigation, and ours."""
    found = {path.name: path.read_text() for path in (*of_flower.glob("*.html"), *TEMPLATES.glob("*.html"))}
    link = (
        '<li class="nav-item"><a class="nav-link{% if active_tab == \'lifecycle\' %} active{% end %}"'
        " href=\"{{ reverse_url('lifecycle') }}\">Lifecycle</a></li>"
    )
    found["navbar.html"] = re.sub("</ul>", lambda end: link + end[0], found["navbar.html"], count=1)
    return found


class Desk:
    """What all pages work with; a look at the database is given up after some seconds."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.watch = Watch(Database(lifecycle.config, patience=5))
        self._counted = 0.0
        self._overview: Overview | None = None

    def overview(self) -> Overview | None:
        """The numbers at the top of the list, at most some seconds old: they cost a look at whole indexes."""
        if time.monotonic() - self._counted > COUNTED_FOR:
            self._counted = time.monotonic()
            try:
                self._overview = self.watch.overview()
            except LifecycleError as error:
                events.database_failed("The objects could not be counted for Flower", error)
                self._overview = None
        return self._overview


class Page(BaseHandler):
    """What the pages share: no framing, work off the event loop, errors as a page."""

    def initialize(self, desk: Desk) -> None:
        self.desk = desk

    def set_default_headers(self) -> None:
        super().set_default_headers()
        self.set_header("X-Frame-Options", "DENY")
        self.set_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.set_header("Cache-Control", "no-store")

    @property
    def may_change(self) -> bool:
        """Whether Flower knows who is there; without a login anybody could be."""
        options = self.application.options
        return bool(options.basic_auth or options.auth) and not getattr(options, "read_only", False)

    @property
    def refreshes(self) -> bool:
        return bool(getattr(self.application.options, "auto_refresh", True))

    async def ask(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, partial(work, *args, **kwargs))

    def given(self, name: str, default: str = "") -> str:
        """A query argument as it was given: Flower's own `get_argument` escapes it."""
        return str(self.get_query_argument(name, default))

    def given_ref(self) -> ObjectRef:
        try:
            return ObjectRef(validate.kind(self.given("kind")), validate.name(self.given("name")))
        except NameInvalid as error:
            raise HTTPError(404, "%s", str(error)) from error

    def page(self, template: str, **values: Any) -> None:
        self.render(
            template, may_change=self.may_change, refreshes=self.refreshes, describe=describe, link=self.link, moment=moment,
            **values,
        )  # fmt: skip

    def link(self, page: str, /, **query: Any) -> str:
        """The address of a page with a query."""
        kept = {key: value for key, value in query.items() if value not in (None, "")}
        return f"{self.reverse_url(page)}?{urlencode(kept)}" if kept else str(self.reverse_url(page))

    def object_link(self, ref: ObjectRef) -> str:
        return self.link("lifecycle_object", kind=ref.kind, name=ref.name)

    def trouble(self, error: LifecycleError, status: int = 503) -> None:
        self.set_status(status)
        self.page("lifecycle_trouble.html", error=str(error))


class ObjectsPage(Page):
    """A list of objects with a filter."""

    @authenticated
    async def get(self) -> None:
        kind, prefix, which = self.given("kind"), self.given("name"), self.given("state", "any")
        if which not in FILTERS:
            raise HTTPError(400, "%s", f"state is one of {', '.join(FILTERS)}")
        after = None
        if self.given("after_kind"):
            after = ObjectRef(self.given("after_kind"), self.given("after_name"))
        watch = self.desk.watch
        try:
            now, found = await self.ask(watch.pick, which, kind or None, prefix, after, PER_PAGE)
            kinds = await self.ask(watch.kinds)
            _, beats = await self.ask(watch.beats)
            overview = await self.ask(self.desk.overview)
        except LifecycleError as error:
            self.trouble(error)
            return
        last = found[-1].state.ref if len(found) == PER_PAGE else None
        filters = {"kind": kind, "state": which, "name": prefix}
        following = last and self.link("lifecycle", **filters, after_kind=last.kind, after_name=last.name)
        tick = now - beats[0]["seen"] if beats else None
        self.page(
            "lifecycle.html", now=now, found=found, kinds=kinds, states=FILTERS, overview=overview, tick=tick,
            beat_is_late=tick is None or tick > BEAT_IS_LATE_MS, following=following, begins=after is None,
            object_link=self.object_link, **filters,
        )  # fmt: skip


class ObjectPage(Page):
    """Everything about one object."""

    @authenticated
    async def get(self) -> None:
        ref = self.given_ref()
        try:
            picture = await self.ask(self.desk.watch.picture, ref)
            dead = picture.dead if picture is not None else await self.ask(self.desk.watch.dead, ref)
        except LifecycleError as error:
            self.trouble(error)
            return
        self.page(
            "lifecycle_object.html", ref=ref, picture=picture, dead=dead, now=picture.now if picture else None,
            pretty=pretty, done=DONE.get(self.given("done")), facts=describe.dead_details,
        )  # fmt: skip


class DeadPage(Page):
    """Dead jobs of all objects, newest first."""

    @authenticated
    async def get(self) -> None:
        reason, before = self.given("reason"), self.given("before")
        if reason and reason not in REASONS:
            raise HTTPError(400, "%s", f"reason is one of {', '.join(REASONS)}")
        if before and not re.fullmatch("[0-9]{1,18}", before):
            raise HTTPError(400, "before is the key of a dead job")
        try:
            found = await self.ask(
                self.desk.watch.dead, None, reason or None, int(before) if before else None, PER_PAGE
            )
            now = await self.ask(self.desk.watch.now)
        except LifecycleError as error:
            self.trouble(error)
            return
        last = found[-1].key if len(found) == PER_PAGE else None
        following = last and self.link("lifecycle_dead", reason=reason, before=last)
        self.page(
            "lifecycle_dead.html", found=found, now=now, reason=reason, reasons=REASONS, following=following,
            begins=not before, object_link=self.object_link, pretty=pretty, facts=describe.dead_details,
        )  # fmt: skip


class Action(Page):
    """Changes something: only by POST, only with a login, only with the token of a page of ours."""

    @authenticated
    async def post(self) -> None:
        if not self.may_change:
            raise HTTPError(403, "Flower has no login, so this page is read-only: start it with --basic-auth or --auth")
        # Flower itself looks at neither with some kinds of login, older versions of it with none.
        RequestHandler.check_xsrf_cookie(self)
        if self.request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise HTTPError(403, "this request comes from another site")
        field = self.get_body_argument
        try:
            ref = ObjectRef(validate.kind(field("kind")), validate.name(field("name")))
        except NameInvalid as error:
            raise HTTPError(400, "%s", str(error)) from error
        action, what = field("action"), field("what", "")
        if action not in ACTIONS:
            raise HTTPError(400, "%s", f"action is one of {', '.join(ACTIONS)}")
        try:
            done = await self.ask(ACTIONS[action], self.desk.lifecycle, ref, what)
        except LifecycleError as error:
            refused = not isinstance(error, (DatabaseUnavailable, SchemaOutdated))
            self.trouble(error, 400 if refused else 503)
            return
        if done:
            events.changed_by_hand(ref, action, what, self._who())
        told = action if done else "gone"
        self.redirect(self.link("lifecycle_object", kind=ref.kind, name=ref.name, done=told), status=303)

    def _who(self) -> str:
        """Who has logged in."""
        user = self.current_user
        if isinstance(user, str):
            return user
        scheme, _, credentials = self.request.headers.get("Authorization", "").partition(" ")
        if scheme != "Basic":
            return "unknown"
        return base64.b64decode(credentials).decode(errors="replace").partition(":")[0]


def _pause(lifecycle: Lifecycle, ref: ObjectRef, what: str) -> bool:
    lifecycle.object(ref.kind, ref.name).pause(what.strip() or "paused in Flower")
    return True


def _resume(lifecycle: Lifecycle, ref: ObjectRef, what: str) -> bool:
    return bool(lifecycle.object(ref.kind, ref.name).resume())


def _cancel(lifecycle: Lifecycle, ref: ObjectRef, what: str) -> bool:
    return lifecycle.store.jobs.cancel(ref, what, None) is not None


def _run_now(lifecycle: Lifecycle, ref: ObjectRef, what: str) -> bool:
    return lifecycle.store.jobs.reschedule(ref, what, None, None, 0) is not None


def _replay(lifecycle: Lifecycle, ref: ObjectRef, what: str) -> bool:
    return _is_dead_job(lifecycle, ref, what) and lifecycle.store.dead.replay(int(what)) is not None


def _purge(lifecycle: Lifecycle, ref: ObjectRef, what: str) -> bool:
    return _is_dead_job(lifecycle, ref, what) and lifecycle.store.dead.purge(int(what))


def _is_dead_job(lifecycle: Lifecycle, ref: ObjectRef, what: str) -> bool:
    """Whether this is the key of a dead job of this very object."""
    if not re.fullmatch("[0-9]{1,18}", what):
        return False
    found = lifecycle.store.watch.dead_job(int(what))
    return found is not None and found.job.object == ref


ACTIONS: dict[str, Callable[[Lifecycle, ObjectRef, str], bool]] = {
    "pause": _pause,
    "resume": _resume,
    "cancel": _cancel,
    "run_now": _run_now,
    "replay": _replay,
    "purge": _purge,
}
DONE = {
    "pause": "Paused: no new run begins until it is resumed.",
    "resume": "Resumed.",
    "cancel": "The job is cancelled.",
    "run_now": "The job is due now: beat sends it with its next tick.",
    "replay": "The dead job was pushed again.",
    "purge": "The dead job is forgotten.",
    "gone": "It was not there any more: nothing was changed.",
}


def moment(ms: int | None, now: int | None) -> str:
    """An instant for people, its distance first."""
    if ms is None:
        return "none"
    return describe.clock(ms) if now is None else f"{describe.distance(ms, now)}, {describe.clock(ms)}"


def pretty(text: str, longest: int = 2000) -> str:
    """JSON for people, cut where it would fill the page."""
    told = json.dumps(json.loads(text), ensure_ascii=False, indent=2)
    return told if len(told) <= longest else f"{told[:longest]}\n… ({len(told):,} characters)"
