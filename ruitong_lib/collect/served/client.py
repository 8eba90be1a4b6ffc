"""One HTTP client for a served model: keys that never leave it, time-outs, and retries that stop where they should."""

import asyncio
import contextlib
import datetime
import email.utils
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from ruitong_lib.collect.served.lenient import read_json
from ruitong_lib.errors import RuitongError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

TRIES = 5  # of one request, the first among them
LONGEST_WAIT = 60.0  # seconds: a server that asks for more is reported, not waited for
CONNECT_SECONDS = 10.0
_PLACEHOLDERS = {"empty", "none", "null", "dummy", "no-key", "sk-no-key-required"}  # words that servers ignore
_RETRIED = {408, 429, *range(500, 600)}


class ServerError(RuitongError):
    """The server cannot be used any more: not reachable, hanging, or refusing what it is asked."""


class Reply(NamedTuple):
    """What came back for one request; the key is in none of it."""

    status: int
    text: str  # the body
    body: Any  # parsed, or None where it is no JSON
    problem: str  # why it is no JSON; empty where it is
    seconds: float
    tries: int
    server: str = ""  # the header
    retry_after: float | None = None  # seconds that the server asks for

    @property
    def ok(self) -> bool:
        """Whether this is a 200 with a JSON body."""
        return self.status == 200 and not self.problem


def timeout() -> float:
    """Return the seconds that one request may take: ``RUITONG_TIMEOUT``, 300 without it.

    Raises
    ------
    RuitongError
        When the variable is no positive number.
    """
    text = os.environ.get("RUITONG_TIMEOUT", "") or "300"
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise RuitongError(f"RUITONG_TIMEOUT must be a number of seconds above 0, got {text!r}")


def read_key(variable: str) -> str:
    """Return the key that an environment variable holds; empty for no variable.

    Raises
    ------
    RuitongError
        When it is not set, or holds what no header can carry. The message never shows the value.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise RuitongError(f"the environment variable {variable} (api_key_env) is not set: export it with the key")
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise RuitongError(f"the key in {variable} holds spaces or characters that no header can carry; copy it again")
    if len(key) < 6 and key.lower() not in _PLACEHOLDERS:
        raise RuitongError(
            f"the key in {variable} has fewer than 6 characters: it could turn up in an answer by chance, and could "
            "then not be kept out of the files. Give the server a longer key, or leave api_key_env empty"
        )
    return key


class Redactor:
    """Replaces a key by ``[key]`` wherever a server repeats it."""

    def __init__(self, key: str) -> None:
        secret = "" if key.lower() in _PLACEHOLDERS else key
        escaped = json.dumps(secret)[1:-1]
        forms = {secret, escaped, escaped.replace("/", "\\/"), quote(secret, safe="")} - {""}
        self._forms = sorted(forms, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return the text without the key."""
        for form in self._forms:
            text = text.replace(form, "[key]")
        return text

    def found(self, value: Any) -> bool:
        """Whether the key stands in a parsed document, however its text was escaped."""
        if not self._forms:
            return False
        if isinstance(value, dict):
            return any(self.found(k) or self.found(v) for k, v in value.items())
        if isinstance(value, list):
            return any(map(self.found, value))
        return isinstance(value, str) and any(form in value for form in self._forms)

    def tree(self, value: Any) -> Any:
        """Return a parsed document without the key."""
        if isinstance(value, dict):
            return {self.text(k): self.tree(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.tree(v) for v in value]
        return self.text(value) if isinstance(value, str) else value


def check_url(url: str) -> str:
    """Return a server's address without a slash at its end.

    Raises
    ------
    RuitongError
        For an address that is no http(s) URL, or that carries a password or a query: those would be stored.
    """
    try:
        parts = urlsplit(url)
        fine = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        fine = False
        parts = urlsplit("")
    if not fine:
        raise RuitongError("base_url must be an http or https address, e.g. http://127.0.0.1:8000/v1")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise RuitongError(
            "base_url must hold no user, password, query or fragment: it is shown in messages. Put the key into an "
            "environment variable and name that in api_key_env"
        )
    return url.rstrip("/")


class Client:
    """Asks one server. Every text that leaves it went through the redactor.

    Parameters
    ----------
    base_url
        The server's address, usually ending in ``/v1``.
    key
        Sent as a bearer token; empty sends none.
    connections
        Requests in flight at once.
    seed
        Of the jitter of the waiting times.
    transport
        For tests: an ``httpx`` transport in place of the network.
    """

    def __init__(
        self, base_url: str, key: str = "", *, connections: int = 1, seed: int = 0, transport: Any = None
    ) -> None:
        try:
            import httpx
        except ImportError as e:
            raise RuitongError("engine 'endpoint' needs httpx: pip install 'ruitong[served]'") from e
        self.base_url = check_url(base_url)
        self.redactor = Redactor(key)
        self.seconds = timeout()
        self._random = random.Random(seed)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self.seconds, connect=min(CONNECT_SECONDS, self.seconds), pool=None),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            transport=transport,
            follow_redirects=False,  # another host would get the key
            trust_env=urlsplit(self.base_url).hostname not in {"127.0.0.1", "localhost", "::1"},  # no proxy to oneself
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def url(self, path: str) -> str:
        """Return the address of a path: ``/completions`` below the base, ``//metrics`` below the server's root."""
        if not path.startswith("//"):
            return self.base_url + path
        return re.sub(r"/v\d+$", "", self.base_url) + path[1:]

    async def get(self, path: str) -> Reply | None:
        """Ask once for a page that a server may have; None where it does not answer in time."""
        import httpx

        try:
            return await self._once("GET", path, None, 1, min(self.seconds, 10.0))
        except (httpx.HTTPError, TimeoutError):
            return None

    async def post(self, path: str, body: dict[str, Any], *, tries: int = TRIES) -> Reply:
        """Ask, and ask again after transport errors, 408, 429, 5xx and bodies that are cut short.

        Returns
        -------
        The last reply, whatever its status. A body that is no JSON after all tries is returned with its ``problem``.

        Raises
        ------
        ServerError
            When nothing came back: no connection after all tries, or no answer within the time-out.
        """
        import httpx

        last, reply = "", None
        for attempt in range(1, tries + 1):
            asked = None
            try:
                reply = await self._once("POST", path, body, attempt, self.seconds)
                if reply.status not in _RETRIED and not (reply.status == 200 and reply.problem):
                    return reply
                asked = reply.retry_after
            except (httpx.ReadTimeout, TimeoutError):
                # Not asked again: the server may still be at work on it, and a second time would only double the load.
                raise ServerError(
                    f"{self.url(path)} gave no answer within {self.seconds:g} s. Set RUITONG_TIMEOUT to more seconds, "
                    "or lower batch_size or max_new_tokens"
                ) from None
            except httpx.HTTPError as e:
                last, reply = self.redactor.text(f"{type(e).__name__}: {e}"), None
            if attempt < tries:
                await asyncio.sleep(self._wait(attempt, asked))
        if reply is not None:
            return reply
        raise ServerError(f"{self.url(path)} cannot be reached ({last}), after {tries} tries. Is the server running?")

    def _wait(self, attempt: int, asked: float | None) -> float:
        if asked is not None and asked > LONGEST_WAIT:
            raise ServerError(f"the server asks to wait {asked:.0f} s (Retry-After): run the same command again then")
        own = 0.5 * 2.0 ** (attempt - 1) * (0.5 + self._random.random())
        return max(own, asked or 0.0)

    async def _once(self, method: str, path: str, body: Any, attempt: int, seconds: float) -> Reply:
        start = time.perf_counter()
        # httpx counts the time between two bytes; a server that drips them would never run out of it.
        async with asyncio.timeout(seconds):
            response = await self._http.request(method, self.url(path), json=body)
        took = time.perf_counter() - start
        text = self.redactor.text(response.content.decode("utf-8", errors="replace"))
        parsed, problem = read_json(text)
        if "\\" in text and self.redactor.found(parsed):  # hidden by escapes
            parsed = self.redactor.tree(parsed)
            text = json.dumps(parsed)
        server = self.redactor.text(response.headers.get("server", ""))
        wait = _retry_after(response)
        return Reply(response.status_code, text, parsed, problem, round(took, 4), attempt, server, wait)


def _retry_after(response: "httpx.Response") -> float | None:
    """Return the seconds of a Retry-After header, which holds seconds or a date; None without one."""
    value = response.headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", value):
        return float(value)
    with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
        when = email.utils.parsedate_to_datetime(value).astimezone(datetime.UTC)
        wait: float = (when - datetime.datetime.now(datetime.UTC)).total_seconds()
        return max(0.0, wait)
    return None


def message(reply: Reply, limit: int = 300) -> str:
    """Return a reply's own words in one line, for an error message."""
    words: Any = reply.body
    for name in ("error", "message", "detail"):
        if isinstance(words, dict) and words.get(name):
            words = words[name]
    text = words if isinstance(words, str) else reply.text if words is None else json.dumps(words, default=str)
    text = " ".join(str(text).split()) or "an empty body"
    return text if len(text) <= limit else text[:limit] + " …"


def run_async(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end in a thread of its own: a notebook's kernel has a running loop already.

    An interrupt cancels the coroutine and waits for its files to be closed.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    done = threading.Event()

    def work() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(asyncio.wait([task]))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            done.set()

    thread = threading.Thread(target=work, name="ruitong-endpoint", daemon=True)
    thread.start()
    try:
        while not done.wait(0.1):
            pass
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        done.wait(10)
        raise
    return task.result()
