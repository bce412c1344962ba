"""Object classes: what is wrong with one is said where it is defined."""

from typing import Any

import pytest
from celery import Celery

from celery_lifecycle import Lifecycle, LifecycleObject
from celery_lifecycle.errors import LifecycleError


@pytest.fixture
def lifecycle() -> Lifecycle:
    return Lifecycle(Celery("classes", set_as_current=False))


def bare(self: Any) -> None: ...


def only_name(self: Any, name: str) -> None: ...


def one_more(self: Any, name: str, region: str, *, lifecycle: Any = None) -> None: ...


@pytest.mark.parametrize("init", [bare, only_name, one_more])
def test_an_init_that_no_link_can_call_is_refused_with_what_to_write(lifecycle: Lifecycle, init: Any) -> None:
    with pytest.raises(LifecycleError, match=r"Cart.__init__\(self.*def __init__\(self, name, \*, lifecycle=None\)"):
        type("Cart", (LifecycleObject,), {"__init__": init}, lifecycle=lifecycle)
    assert "cart" not in lifecycle.kinds


def test_an_init_may_take_more_that_has_a_default(lifecycle: Lifecycle) -> None:
    class Base(LifecycleObject, abstract=True):
        def __init__(self, name: str, region: str) -> None: ...

    class Cart(Base, lifecycle=lifecycle):
        def __init__(self, name: str, *more: Any, region: str = "eu", **options: Any) -> None:
            LifecycleObject.__init__(self, name, **options)
            self.region = region

    assert lifecycle.object("cart", "a").region == "eu"
    assert Cart("b", region="us", lifecycle=lifecycle).region == "us"
