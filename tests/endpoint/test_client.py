"""The client: what is asked again and what is not, waiting, time-outs, and real servers that hang, drip or die."""

import asyncio
import contextlib
import datetime
import email.utils
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from ruitong_lib import RuitongError
from ruitong_lib.collect import endpoint
from ruitong_lib.collect.served import client as module
from ruitong_lib.collect.served.client import (
    Client,
    Redactor,
    Reply,
    ServerError,
    check_url,
    message,
    read_key,
    run_async,
)

WAIT = Client._wait


def ask(handler: Callable[[httpx.Request], httpx.Response], **more: Any) -> Reply:
    async def main() -> Reply:
        async with Client("http://s.test/v1", transport=httpx.MockTransport(handler), **more) as client:
            return await client.post("/completions", {"a": 1})

    return run_async(main)


class TestRetries:
    @pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 599])
    def test_a_busy_server_is_asked_again(self, status: int) -> None:
        seen: list[int] = []

        def handler(_: httpx.Request) -> httpx.Response:
            seen.append(1)
            return httpx.Response(status if len(seen) < 3 else 200, json={"ok": 1})

        reply = ask(handler)
        assert (reply.status, reply.tries, len(seen)) == (200, 3, 3)

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 307])
    def test_a_refusal_is_not(self, status: int) -> None:
        seen: list[int] = []

        def handler(_: httpx.Request) -> httpx.Response:
            seen.append(1)
            return httpx.Response(status, json={"error": "no"}, headers={"location": "http://elsewhere.test/"})

        assert ask(handler).status == status
        assert len(seen) == 1

    def test_a_lost_connection_is_asked_again_and_then_named(self) -> None:
        seen: list[int] = []

        def handler(_: httpx.Request) -> httpx.Response:
            seen.append(1)
            raise httpx.RemoteProtocolError("peer closed connection")

        with pytest.raises(ServerError, match=r"cannot be reached.*peer closed connection.*after 5 tries"):
            ask(handler)
        assert len(seen) == module.TRIES

    def test_a_body_that_is_cut_short_is_asked_again(self) -> None:
        seen: list[int] = []

        def handler(_: httpx.Request) -> httpx.Response:
            seen.append(1)
            return httpx.Response(200, text='{"a": 1' if len(seen) == 1 else '{"a": 1}')

        assert ask(handler).body == {"a": 1}
        assert len(seen) == 2

    def test_the_last_failure_is_data(self) -> None:
        reply = ask(lambda _: httpx.Response(500, text="Out of range float values are not JSON compliant"))
        assert (reply.status, reply.tries) == (500, module.TRIES)
        assert message(reply) == "Out of range float values are not JSON compliant"

    def test_a_retry_after_is_honoured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        waits: list[float] = []
        monkeypatch.setattr(Client, "_wait", WAIT)

        async def sleep(seconds: float) -> None:
            waits.append(seconds)

        monkeypatch.setattr(module.asyncio, "sleep", sleep)
        later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=40)
        headers = [{"retry-after": "7"}, {"retry-after": email.utils.format_datetime(later)}, {"retry-after": "soon"}]

        def handler(_: httpx.Request) -> httpx.Response:
            return (
                httpx.Response(429, json={}, headers=headers[len(waits)])
                if len(waits) < 3
                else httpx.Response(200, json={})
            )

        assert ask(handler).status == 200
        assert waits[0] == 7
        assert 35 < waits[1] <= 40
        assert 1 <= waits[2] <= 3

    def test_a_server_that_asks_for_an_hour_is_reported(self) -> None:
        with pytest.raises(ServerError, match="asks to wait 3600 s"):
            ask(lambda _: httpx.Response(429, json={}, headers={"retry-after": "3600"}))

    def test_waits_grow_are_jittered_and_seeded(self) -> None:
        def waits(seed: int) -> list[float]:
            async def main() -> list[float]:
                async with Client("http://s.test", seed=seed) as client:
                    return [WAIT(client, n, None) for n in (1, 2, 3, 4)]

            return run_async(main)

        assert waits(1) == waits(1) != waits(2)
        for n, w in enumerate(waits(1)):
            assert 0.25 * 2**n <= w <= 0.75 * 2**n


class TestRunAsync:
    def test_works_inside_a_running_loop_as_a_notebook_has(self) -> None:
        async def inner() -> int:
            return 5

        async def notebook() -> int:
            return run_async(inner)

        assert asyncio.run(notebook()) == 5

    def test_an_error_comes_through(self) -> None:
        async def bad() -> None:
            raise ServerError("x")

        with pytest.raises(ServerError, match="x"):
            run_async(bad)


class TestInput:
    @pytest.mark.parametrize("url", ["", "served:8000", "ftp://a/v1", "http://", "http://a:b:c/v1", "//a/v1"])
    def test_an_address_that_is_none(self, url: str) -> None:
        with pytest.raises(RuitongError, match="must be an http or https address"):
            check_url(url)

    @pytest.mark.parametrize("url", ["http://u:secret@a/v1", "http://a/v1?api_key=secret", "http://a/v1#secret"])
    def test_an_address_with_a_secret_is_refused_and_not_shown(self, url: str) -> None:
        with pytest.raises(RuitongError) as e:
            check_url(url)
        assert "secret" not in str(e.value)

    @pytest.mark.parametrize("value", ["0", "-1", "x", "inf", "nan"])
    def test_a_time_out_that_is_none(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RUITONG_TIMEOUT", value)
        with pytest.raises(RuitongError, match="RUITONG_TIMEOUT"):
            module.timeout()

    def test_a_placeholder_key_is_a_word_that_texts_may_hold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("A_KEY", "EMPTY")
        assert read_key("A_KEY") == "EMPTY"
        assert Redactor("EMPTY").text("the set is EMPTY") == "the set is EMPTY"

    def test_paths_below_the_root(self) -> None:
        async def main() -> list[str]:
            async with Client("http://a.test/x/v1/") as client:
                return [client.url("/models"), client.url("//metrics")]

        assert run_async(main) == ["http://a.test/x/v1/models", "http://a.test/x/metrics"]


@contextlib.contextmanager
def server(post: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A real server on this machine; its pages about itself are not there."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            post(self)

        def log_message(self, *_: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


class TestRealServers:
    def test_one_that_hangs_is_reported_within_the_time_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RUITONG_TIMEOUT", "0.3")
        over = threading.Event()
        asked: list[int] = []

        def hang(handler: BaseHTTPRequestHandler) -> None:
            asked.append(1)
            over.wait(20)

        with server(hang) as url:
            with pytest.raises(ServerError, match=r"gave no answer within 0\.3 s.*RUITONG_TIMEOUT"):
                endpoint.probe_server(url)
            over.set()
        assert len(asked) == 1  # a request that may still be worked on is not sent again

    def test_one_that_drips_is_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RUITONG_TIMEOUT", "0.5")
        over = threading.Event()

        def drip(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("content-length", "1000")
            handler.end_headers()
            with contextlib.suppress(OSError):
                while not over.wait(0.1):
                    handler.wfile.write(b" ")

        with server(drip) as url:
            with pytest.raises(ServerError, match=r"gave no answer within 0\.5 s"):
                endpoint.probe_server(url)
            over.set()

    def test_one_that_sends_an_empty_body(self) -> None:
        def empty(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("content-length", "0")
            handler.end_headers()

        with server(empty) as url, pytest.raises(ServerError, match="an empty body"):
            endpoint.probe_server(url)

    def test_one_that_breaks_off(self) -> None:
        def half(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("content-length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"choices": [')
            handler.close_connection = True

        with server(half) as url, pytest.raises(ServerError, match="cannot be reached"):
            endpoint.probe_server(url)

    def test_one_that_is_not_there(self) -> None:
        with server(lambda _: None) as url:
            pass
        with pytest.raises(ServerError, match=r"cannot be reached.*Is the server running\?"):
            endpoint.probe_server(url)
