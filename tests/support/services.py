"""Where the services are that tests talk to, and what happens when one is missing.

The addresses are those of a plain local installation; each can be set by an environment variable.
"""

import os
from typing import NoReturn

import pytest

REQUIRE_SERVICES = "LIFECYCLE_REQUIRE_SERVICES"

#: Environment variable and default of every address.
ADDRESSES = {
    "postgresql": ("LIFECYCLE_TEST_POSTGRESQL", "postgresql+psycopg://root@127.0.0.1:5432/test"),
    "mariadb": ("LIFECYCLE_TEST_MARIADB", "mysql+pymysql://root@127.0.0.1:3306/?charset=utf8mb4"),
    "redis": ("LIFECYCLE_TEST_REDIS", "redis://127.0.0.1:6379"),
    "rabbitmq": ("LIFECYCLE_TEST_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672/"),
    "rabbitmq_management": ("LIFECYCLE_TEST_RABBITMQ_MANAGEMENT", "http://127.0.0.1:15672"),
}

#: Longest time in seconds that a missing service may cost, once for each test process.
CONNECT_TIMEOUT = 3


def address(service: str) -> str:
    """The URL of a service: its environment variable, or the local default."""
    variable, default = ADDRESSES[service]
    return os.environ.get(variable) or default


def unavailable(service: str, reason: object) -> NoReturn:
    """Fail the test if services are required, as they are in CI; skip it otherwise."""
    variable, _ = ADDRESSES[service]
    first_line = str(reason).partition("\n")[0]
    text = f"{service} can't be used at {address(service)} ({variable} sets another address): {first_line}"
    if os.environ.get(REQUIRE_SERVICES) == "1":
        pytest.fail(text, pytrace=False)
    pytest.skip(text)
