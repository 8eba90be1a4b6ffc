"""Raw responses, kept beside the shard: one gzip file a prompt and scoring, written whole or not at all.

The shard is made from these files alone. A run that was cut short asks only for what is missing; a file whose request
or server is another one does not count.
"""

import gzip
import hashlib
import json
import math
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from ruitong_lib.cell import slug
from ruitong_lib.collect.served.client import Reply
from ruitong_lib.collect.served.lenient import read_json


def request_sha256(path: str, body: dict[str, Any]) -> str:
    """Hash a request: the path and everything that is asked."""
    return hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()


class Raw:
    """The folder of one cell's responses.

    Parameters
    ----------
    folder
        ``outputs/cells/raw/<label>``.
    content_key
        Of the cell; files of another one are not used.
    server
        What the server says it is; a run never mixes two.
    """

    def __init__(self, folder: Path, *, content_key: str, server: dict[str, Any]) -> None:
        self.folder = folder
        self.key = content_key
        self.server = server

    def clear(self) -> None:
        """Forget every response: the cell is collected anew."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, index: int, prompt: str, scoring: str) -> Path:
        """Return where a response belongs."""
        return self.folder / f"{index:05d}-{slug(prompt)[:60]}.{scoring}.json.gz"

    def read(self, path: Path, prompt: str, sha: str) -> dict[str, Any] | None:
        """Return a stored response, or None where it is missing, damaged, or the answer to something else."""
        try:
            found = load(path)
        except (OSError, EOFError, ValueError, zlib.error):
            return None
        wanted = {"content_key": self.key, "prompt": prompt, "request_sha256": sha, "server": self.server}
        return found if all(found.get(n) == v for n, v in wanted.items()) else None

    def write(self, path: Path, ask: Any, *, sha: str, reply: Reply, started: float) -> None:
        """Store a response; a reader sees all of it or nothing."""
        found = {
            "content_key": self.key,
            "prompt": ask.prompt,
            "scoring": ask.scoring,
            "request_sha256": sha,
            "request": ask.body,
            "server": self.server,
            "status": reply.status,
            "started": round(started, 3),
            "seconds": reply.seconds,
            "tries": reply.tries,
            "body": reply.text,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(gzip.compress(json.dumps(found).encode("utf-8", "surrogatepass"), 4, mtime=0))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Read one stored response.

    Raises
    ------
    ValueError, OSError, EOFError, zlib.error
        For a file that is not one.
    """
    with gzip.open(path, "rt", encoding="utf-8") as f:
        found = json.load(f)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no response")
    return found


def body_of(found: dict[str, Any]) -> tuple[Any, str]:
    """Return the parsed body of a stored response, and why there is none."""
    parsed, problem = read_json(str(found.get("body", "")))
    if found.get("status") != 200:
        return None, f"HTTP {found.get('status')}: {str(found.get('body', ''))[:200]}"
    return parsed, problem


def busy_seconds(times: list[tuple[float, float]]) -> float:
    """Return for how long at least one request (start, seconds) was in flight: the pause of a resumed run is none."""
    total, end = 0.0, -math.inf
    for start, seconds in sorted(times):
        total += max(0.0, start + seconds - max(start, end))
        end = max(end, start + seconds)
    return total
