"""How a link travels: one header, as text."""

import json

import pytest

from celery_lifecycle.link import HEADER, carried_on, header_in, header_of, link_of, rest_header
from celery_lifecycle.model import ALARM, Brief, ObjectRef, Shipment

FIRST = Brief("a", 1, "cart.remind", "celery", 5, hung_timeout_ms=700, singleflight=True)
CHAIN = Shipment(
    7, ObjectRef("cart", "ünna"), "d1", None, 2, (FIRST, Brief("b", 1, "cart.remind", "celery", 6)), True, 9
)


def test_a_header_is_one_text_and_comes_back_as_it_was():
    text = header_of(CHAIN, str(CHAIN.ref), "db1")
    assert isinstance(text, str)
    header = header_in({"id": "d1-2", HEADER: text})
    assert header["name"] == "cart/ünna"
    link = link_of(header, "d1-2", last=False)
    assert (link.database, link.object_id, link.dispatch, link.position) == ("db1", 7, "d1", 2)
    assert (link.job, link.token, link.hung_timeout_ms, link.singleflight) == ("a", None, 700, True)


def test_each_link_hands_on_the_token_and_what_all_have_in_common_and_the_last_one_is_the_alarm():
    first = header_in({HEADER: header_of(CHAIN, str(CHAIN.ref), "db1")})
    rest = [{"options": {"headers": {"theirs": 1, HEADER: rest_header(3, CHAIN.jobs[1])}}}]
    alarm, second = carried_on(first, rest, "t1", "cart.on_alarm")
    assert second["options"]["headers"]["theirs"] == 1
    link = link_of(header_in(second["options"]["headers"]), "d1-3", last=False)
    assert (link.job, link.token, link.position, link.object_id, link.singleflight) == ("b", "t1", 3, 7, False)
    assert "head" not in header_in(second["options"]["headers"])
    link = link_of(header_in(alarm["options"]["headers"]), "d1-4", last=True)
    assert (link.job, link.position, link.token) == (ALARM, 4, "t1")


@pytest.mark.parametrize("other", [None, "", "ours", {"db": "theirs"}, 3, "[1]", json.dumps("{")])
def test_what_else_has_a_header_of_this_name_is_no_link(other):
    assert header_in({HEADER: other}) is None
    assert header_in({}) is None
    assert header_in(None) is None
