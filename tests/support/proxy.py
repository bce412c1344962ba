"""A TCP proxy before a service, so that a test can take the service away from itself and nobody else."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

T = TypeVar("T")

_DEFAULT_PORTS = {"amqp": 5672, "redis": 6379, "postgresql": 5432, "mysql": 3306, "mariadb": 3306}


class Proxy:
    """Passes connections on to the service in ``url`` until it is told not to.

    ``url`` gives the same URL with the proxy's own host and port. ``cut`` ends all connections and refuses
    new ones, as a service that died; ``stall`` keeps them open and passes nothing on, as a host that is gone
    without a word; ``restore`` ends either.
    """

    def __init__(self, target_url: str) -> None:
        parts = urlsplit(target_url)
        scheme = parts.scheme.split("+")[0]
        if parts.hostname is None or scheme == "sqlite":
            raise ValueError(f"{target_url!r} names no host that a proxy could stand before")
        self._target = (parts.hostname, parts.port or _DEFAULT_PORTS[scheme])
        self._parts = parts
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-proxy", daemon=True)
        self._thread.start()
        self._flowing = self._call(self._new_event())
        self._call(self._listen())

    @property
    def url(self) -> str:
        """The target's URL as it is reached through the proxy."""
        credentials, at, _ = self._parts.netloc.rpartition("@")
        return urlunsplit(self._parts._replace(netloc=f"{credentials}{at}127.0.0.1:{self._port}"))

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        return len(self._writers) // 2

    def cut(self) -> None:
        """End all connections and refuse new ones."""
        self._call(self._stop_listening())

    def stall(self) -> None:
        """Keep connections, and take new ones, but let no byte pass."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def restore(self) -> None:
        """Work again, on the same port."""
        self._loop.call_soon_threadsafe(self._flowing.set)
        self._call(self._listen())

    def close(self) -> None:
        """End all connections and the proxy itself."""
        if self._loop.is_closed():
            return
        self._call(self._stop_listening())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10)

    @staticmethod
    async def _new_event() -> asyncio.Event:
        event = asyncio.Event()
        event.set()
        return event

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        pumps = list(self._pumps)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        if self._server is None:  # cut in the meantime
            writer.transport.abort()
            target_writer.transport.abort()
            return
        for source, sink in ((reader, target_writer), (target_reader, writer)):
            self._writers.add(sink)
            pump = self._loop.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    await self._flowing.wait()
                    sink.write(data)
                    await sink.drain()
        finally:
            self._writers.discard(sink)
            sink.close()
