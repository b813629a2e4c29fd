"""Between a client that we did not write and a server: passes everything on, and notes when each request for an answer came,
when its answer had gone out, and the answer."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tasks.common.sglang_client import Completion

if TYPE_CHECKING:
    from aiohttp import web

_MAX_BODY_BYTES = 2**30
# A server that hangs is ended elsewhere: nobody waits for its answers here.
_SHUTDOWN_S = 1.0
_PASSED_ON = ("content-type", "authorization")


@dataclass(frozen=True)
class Recorded:
    """One request for an answer, as it passed.

    Attributes:
        input_ids: what was asked; None where it was text.
        began, ended: time.perf_counter() when it came, and when the whole answer had gone out.
        spec_accept_length: SGLang's own figure of it, None without speculation.
    """

    input_ids: list[int] | None
    began: float
    ended: float
    answer: Completion
    spec_accept_length: float | None


class RecordingProxy:
    """Listens on loopback while the block runs.

    with RecordingProxy(server.url) as proxy:
        ask(proxy.url)
        recorded = proxy.take()
    """

    def __init__(self, upstream: str):
        self._upstream = upstream
        self._raw: list[tuple[bytes, float, float, bytes]] = []
        self._close: list[Callable[[], Awaitable[None]]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="recording proxy", daemon=True)
        self.url = ""

    def __enter__(self) -> "RecordingProxy":
        self._thread.start()
        try:
            self.url = f"http://127.0.0.1:{self._await(self._start())}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._await(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def take(self) -> list[Recorded]:
        """What was answered since the last call, in the order in which it was asked; read now, not while it passed."""
        raw, self._raw = self._raw, []
        return [_read(*one) for one in sorted(raw, key=lambda one: one[1])]

    def _await(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self) -> int:
        from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

        self._session = ClientSession(timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0))
        self._close.append(self._session.close)
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        self._close.append(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    async def _stop(self) -> None:
        for close in reversed(self._close):
            await close()

    async def _pass_on(self, request: "web.Request") -> "web.StreamResponse":
        from aiohttp import web

        began, body = perf_counter(), await request.read()
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        url = self._upstream + request.raw_path
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "text/plain")}
            )
            await response.prepare(request)
            last, rest = b"", b""
            async for piece in answer.content.iter_any():
                await response.write(piece)
                # Of a stream the last event holds the whole answer.
                *whole, rest = (rest + piece).split(b"\n\n")
                last = next((event for event in reversed(whole) if event.startswith(b"data: {")), last)
        # Before the client can know that this was all.
        if request.path == "/generate" and answer.status == 200:
            self._raw.append((body, began, perf_counter(), last or rest))
        await response.write_eof()
        return response


def _read(body: bytes, began: float, ended: float, answer: bytes) -> Recorded:
    answered = json.loads(answer.removeprefix(b"data: "))
    return Recorded(
        json.loads(body).get("input_ids"),
        began,
        ended,
        Completion.of(answered, ended - began),
        answered["meta_info"].get("spec_accept_length"),
    )
