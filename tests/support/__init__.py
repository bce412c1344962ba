"""What tests of every kind share: private databases and brokers, waiting, outages."""

from tests.support.brokers import Broker
from tests.support.databases import Database
from tests.support.proxy import Proxy
from tests.support.waiting import WaitTimeout, wait_until

__all__ = ["Broker", "Database", "Proxy", "WaitTimeout", "wait_until"]
