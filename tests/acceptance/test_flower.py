"""Flower's Lifecycle pages, in a real Flower over real HTTP: what they show, to whom, and what may be changed there."""

import base64
import http.cookiejar
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode

import pytest

from celery_lifecycle.model import ObjectRef, Why
from tests.support import wait_until
from tests.support.protocol import CART, Table, links_of, table

pytest.importorskip("flower")

ROOT = Path(__file__).parents[2]
HOSTILE = ObjectRef("cart", "<script>alert('name')</script> \" & %2F/../ ü日")
LOGIN = {"Authorization": "Basic " + base64.b64encode(b"ann:secret").decode()}


class Browser:
    """Keeps cookies, follows redirects, and gives status and text of every answer."""

    def __init__(self, base: str, headers: dict[str, str]) -> None:
        self.base, self.headers = base, headers
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))

    def get(self, path: str) -> tuple[int, str]:
        return self._open(urllib.request.Request(self.base + path, headers=self.headers))

    def post(self, path: str, fields: dict[str, str], **headers: str) -> tuple[int, str]:
        given = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return self._open(urllib.request.Request(self.base + path, urlencode(fields).encode(), given))

    def _open(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with self._opener.open(request, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def object(self, ref: ObjectRef = CART) -> tuple[int, str]:
        return self.get(f"/lifecycle/object?{urlencode({'kind': ref.kind, 'name': ref.name})}")

    def press(self, action: str, what: str = "", ref: ObjectRef = CART) -> tuple[int, str]:
        """Press a button of the object's page: the form is sent as it stands there."""
        _, page = self.object(ref)
        forms = [form for form in Forms(page).found if form.action == action and form.fields.get("what", "") == what]
        if action == "pause":
            forms = [form for form in Forms(page).found if form.action == action]
        assert forms, f"no button {action} {what} on the page"
        return self.post(forms[0].target, {**forms[0].fields, "action": action, **({"what": what} if what else {})})


class Form:
    def __init__(self, method: str, target: str) -> None:
        self.method, self.target, self.action = method, target, ""
        self.fields: dict[str, str] = {}


class Forms(HTMLParser):
    """The forms of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[Form] = []
        self._open: Form | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "form":
            self._open = Form(given.get("method") or "get", given.get("action") or "")
            self.found.append(self._open)
        elif self._open is not None and tag == "input":
            self._open.fields[given.get("name") or ""] = given.get("value") or ""
        elif self._open is not None and tag == "button":
            self._open.action = given.get("value") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._open = None


@contextmanager
def flower(directory: Path, url: str, *options: str) -> Iterator[str]:
    """A Flower on the database; gives its address."""
    (directory / "shown.py").write_text(
        "from celery import Celery\nfrom celery_lifecycle import Lifecycle\n"
        "app = Celery('shown', broker='memory://')\n"
        f"lifecycle = Lifecycle(app, database_url={url!r})\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "celery", "-A", "shown", "lifecycle", "flower"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}
    with (directory / "flower.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--port={port}", "--address=127.0.0.1", *options],
            env=environment, cwd=directory, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def answers() -> bool:
        assert process.poll() is None, (directory / "flower.log").read_text()
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(answers, 60, lambda: (directory / "flower.log").read_text())
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flower")


@pytest.fixture(scope="module")
def t(directory: Path) -> Iterator[Table]:
    with table(f"sqlite:///{directory / 'jobs.db'}", real_time=True) as made:
        yield made


@pytest.fixture(scope="module")
def site(directory: Path, t: Table) -> Iterator[str]:
    with flower(directory, t.url, "--basic-auth=ann:secret") as address:
        yield address


@pytest.fixture
def ann(site: str) -> Browser:
    return Browser(site, LOGIN)


@pytest.fixture(autouse=True)
def _clean(t: Table) -> Iterator[None]:
    yield
    for one in t.store.objects.find_many(limit=1000):
        t.store.objects.destroy(one.ref)
    for dead in t.store.dead.list(limit=1000):
        t.store.dead.purge(dead.key)


def dead_job(t: Table, ref: ObjectRef = CART) -> int:
    t.push("doomed", ref)
    t.store.jobs.cancel(ref, "doomed", None, Why.REVOKED)
    return t.store.dead.list(ref)[-1].key


def test_all_pages_stand_behind_the_login(site):
    nobody = Browser(site, {})
    for path in ("/lifecycle", "/lifecycle/object?kind=cart&name=user-42", "/lifecycle/dead"):
        assert nobody.get(path)[0] == 401
    assert nobody.post("/lifecycle/do", {"kind": "cart", "name": "user-42", "action": "pause"})[0] in (401, 403)
    assert Browser(site, {"Authorization": "Basic eDp5"}).get("/lifecycle")[0] == 401


def test_the_list_shows_objects_with_their_states_and_filters_them(t, ann):
    t.push("remind", delay=3600)
    t.push("later", ObjectRef("import", "file-1"), delay=60)
    t.store.objects.pause(ObjectRef("import", "file-2"), "holiday")
    status, page = ann.get("/lifecycle")
    assert status == 200
    for text in ("user-42", "file-1", "file-2", "holiday", "waiting", "paused"):
        assert text in page
    page = ann.get("/lifecycle?kind=import&state=paused")[1]
    assert "file-2" in page
    assert "file-1</a>" not in page
    assert "user-42</a>" in ann.get("/lifecycle?name=user")[1]
    assert ann.get("/lifecycle?state=nonsense")[0] == 400


def test_a_long_list_is_paged(t, ann):
    t.store.jobs.push_many(
        [t.draft("a", ObjectRef("cart", f"n{number:03}"), delay_ms=9_000_000) for number in range(120)]
    )
    page = ann.get("/lifecycle")[1]
    assert "n099</a>" in page
    assert "n100</a>" not in page
    following = re.search(r'href="([^"]*after_name[^"]*)"', page)
    assert following is not None
    page = ann.get(following[1].replace("&amp;", "&"))[1]
    assert "n100</a>" in page
    assert "n119</a>" in page
    assert "n099</a>" not in page


def test_flowers_own_pages_lead_to_it(ann):
    assert 'href="/lifecycle">Lifecycle</a>' in ann.get("/workers")[1]


def test_an_object_shows_its_run_its_jobs_and_its_dead_jobs(t, ann):
    dead_job(t)
    t.push("remind", payload_json='{"template":"forgot"}')
    t.begin(links_of(t.shipped())[0])
    status, page = ann.object()
    assert status == 200
    for text in ("runs remind (task cart.remind), link 1 of its run", "in flight", "template", "doomed", "revoked"):
        assert text in page
    t.die(links_of_running(t))
    page = ann.object()[1]
    assert "Strikes" in page


def links_of_running(t: Table):
    flight = t.find().in_flight
    assert flight is not None
    dispatch, _, position = flight.task_id.rpartition("-")
    from tests.support.protocol import link

    return link(flight.job, int(position), dispatch=dispatch, object_id=t.find().id, token=t.find().token)


def test_an_object_that_is_not_there_is_told_and_a_name_that_can_be_none_is_not_found(ann):
    assert "There is no such object now" in ann.object(ObjectRef("cart", "nobody"))[1]
    assert ann.get("/lifecycle/object?kind=1&name=x")[0] == 404
    assert ann.get("/lifecycle/object")[0] == 404


def test_hostile_names_ids_payloads_and_errors_are_text_and_nothing_else(t, ann):
    evil = "<img src=x onerror=alert(1)>"
    t.push(evil, HOSTILE, payload_json='"</pre><script>alert(2)</script>"', delay=60)
    t.store.objects.pause(HOSTILE, evil)
    dead_job(t, HOSTILE)
    for status, page in (ann.get("/lifecycle"), ann.object(HOSTILE), ann.get("/lifecycle/dead")):
        assert status == 200
        assert "<script>alert" not in page
        assert "<img src=x" not in page
    assert "&lt;script&gt;alert(" in ann.get("/lifecycle")[1]
    link = re.search(r'href="(/lifecycle/object[^"]*)"', ann.get("/lifecycle")[1])
    assert link is not None
    status, page = ann.get(link[1].replace("&amp;", "&"))
    assert "&lt;img src=x onerror=alert(1)&gt;" in page, "the link of the list leads to the object"
    assert "<script>alert" not in ann.get("/lifecycle?name=%22%3E%3Cscript%3Ealert(1)%3C/script%3E")[1]


def test_the_buttons_do_what_they_say(t, ann):
    t.push("remind", delay=3600)
    assert "Paused" in ann.press("pause", "stock-taking")[1]
    assert t.find().paused == "stock-taking"
    assert "Resumed" in ann.press("resume")[1]
    assert t.find().paused is None
    assert "due now" in ann.press("run_now", "remind")[1]
    assert t.find().wake_at <= t.store.watch.now()
    assert "cancelled" in ann.press("cancel", "remind")[1]
    assert not t.exists()


def test_dead_jobs_are_replayed_and_forgotten(t, ann):
    key = dead_job(t)
    assert "pushed again" in ann.press("replay", str(key))[1]
    assert t.ids() == ["doomed"]
    other = dead_job(t, ObjectRef("cart", "user-1"))
    assert "forgotten" in ann.press("purge", str(other), ObjectRef("cart", "user-1"))[1]
    assert t.store.dead.list() == []


def test_buttons_work_for_hostile_names(t, ann):
    t.push("<b>'\"&amp;", HOSTILE, delay=3600)
    assert "cancelled" in ann.press("cancel", "<b>'\"&amp;", HOSTILE)[1]
    assert not t.exists(HOSTILE)


def test_a_reason_that_is_not_allowed_is_refused_and_told(t, ann):
    t.push("remind", delay=3600)
    status, page = ann.press("pause", "x" * 201)
    assert status == 400
    assert "201 bytes" in page
    assert t.find().paused is None


def test_a_job_that_is_gone_meanwhile_is_told(t, ann):
    t.push("remind", delay=3600)
    page = ann.object()[1]
    form = next(form for form in Forms(page).found if form.action == "cancel")
    t.store.jobs.cancel(CART, "remind", None)
    status, page = ann.post(form.target, {**form.fields, "action": "cancel"})
    assert status == 200
    assert "not there any more" in page


def test_a_dead_job_of_another_object_is_not_touched(t, ann):
    key = dead_job(t)
    t.push("remind", ObjectRef("cart", "user-1"), delay=60)
    form = next(form for form in Forms(ann.object(ObjectRef("cart", "user-1"))[1]).found if form.action == "cancel")
    page = ann.post(form.target, {**form.fields, "action": "purge", "what": str(key)})[1]
    assert "not there any more" in page
    assert [dead.key for dead in t.store.dead.list()] == [key]


def test_nothing_is_changed_without_the_token_by_get_or_from_another_site(t, ann):
    t.push("remind", delay=3600)
    fields = {"kind": "cart", "name": "user-42", "action": "cancel", "what": "remind"}
    assert ann.get(f"/lifecycle/do?{urlencode(fields)}")[0] == 405
    assert ann.post("/lifecycle/do", fields)[0] == 403
    assert ann.post("/lifecycle/do", {**fields, "_xsrf": "2|00000000|0|0"})[0] == 403
    form = next(form for form in Forms(ann.object()[1]).found if form.action == "cancel")
    assert ann.post(form.target, {**form.fields, **fields}, Sec_Fetch_Site="cross-site")[0] == 403
    assert t.ids() == ["remind"]
    assert ann.post(form.target, {**form.fields, **fields, "action": "nonsense"})[0] == 400
    assert ann.post(form.target, {**form.fields, **fields, "name": ""})[0] == 400
    assert ann.post(form.target, {**form.fields, **fields})[0] == 200
    assert t.ids() == []


def test_no_page_may_be_framed(site):
    request = urllib.request.Request(site + "/lifecycle", headers=LOGIN)
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["X-Frame-Options"] == "DENY"


def test_without_a_login_it_is_read_only_also_under_a_prefix(t, tmp_path):
    t.push("remind", delay=3600)
    dead_job(t)
    with flower(tmp_path, t.url, "--url-prefix=flower") as address:
        anybody = Browser(address + "/flower", {})
        for status, page in (anybody.get("/lifecycle"), anybody.object(), anybody.get("/lifecycle/dead")):
            assert status == 200
            assert 'method="post"' not in page
        assert 'href="/flower/lifecycle/object?' in anybody.get("/lifecycle")[1]
        cookies = [one for handler in anybody._opener.handlers for one in getattr(handler, "cookiejar", ())]
        xsrf = next((one.value or "" for one in cookies if one.name == "_xsrf"), "")
        fields = {"kind": "cart", "name": "user-42", "action": "cancel", "what": "remind", "_xsrf": xsrf}
        assert anybody.post("/lifecycle/do", fields)[0] == 403
    assert t.ids() == ["remind"]


def test_a_database_that_is_gone_is_a_page_that_says_so(tmp_path):
    path = tmp_path / "jobs.db"
    with table(f"sqlite:///{path}", real_time=True) as t, flower(tmp_path, t.url) as address:
        browser = Browser(address, {})
        assert browser.get("/lifecycle")[0] == 200
        with t.store.database.transaction() as tx:
            tx.run("ALTER TABLE lifecycle_objects RENAME TO gone")
        status, page = browser.get("/lifecycle")
        assert status == 503
        assert "lifecycle migrate" in page


def test_it_does_not_start_on_missing_tables(tmp_path):
    with pytest.raises(AssertionError, match="lifecycle migrate"), flower(tmp_path, f"sqlite:///{tmp_path / 'no.db'}"):
        pass
