"""Serves a job's report and figures to browsers of this machine."""

from __future__ import annotations

import json
import secrets
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import TYPE_CHECKING, Any

from pipette_launch.errors import UsageError
from pipette_launch.facts import files
from pipette_launch.report.live import live_line, live_rows
from pipette_launch.report.page.live import LIVE_POLICY, live_page
from pipette_launch.text import printable

if TYPE_CHECKING:
    from pipette_launch.launch.live.watched import Watched

ADDRESS = "127.0.0.1"
HOSTS = frozenset({"localhost", ADDRESS, "[::1]"})
"""Names of this machine. A page of another site that makes its own name lead here would send that name."""
HEADERS = {
    "Content-Security-Policy": f"{LIVE_POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class LiveServer(ThreadingHTTPServer):
    """Two pages below a secret folder: other users of this machine reach its ports, and must not see the job."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int) -> None:
        """Listen.

        Args:
            watched: the job.
            port: 0 for a free one.

        Raises:
            UsageError: the port is taken, or may not be used.

        """
        self._watched = watched
        self._lock = Lock()
        self._folder = f"/{secrets.token_urlsafe(16)}/"
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise UsageError(f"--serve {port}: {error.strerror or error}; name another port, or none") from error
        self.url = f"http://{ADDRESS}:{self.server_port}{self._folder}"

    def answer(self, path: str) -> tuple[str, str] | None:
        """Return what stands at a path, and its kind; None for nothing."""
        # No path of a request is ever one of the file system.
        if secrets.compare_digest(path.encode(), self._folder.encode()):
            return live_page(self._report()), "text/html; charset=utf-8"
        if secrets.compare_digest(path.encode(), f"{self._folder}status.json".encode()):
            with self._lock:
                return json.dumps(self._status(), allow_nan=False), "application/json"
        return None

    def _status(self) -> dict[str, Any]:
        job = self._watched.look(time.time())
        page = self._watched.page
        try:
            changed_ns = page.stat().st_mtime_ns if page else 0
        except OSError:
            changed_ns = 0
        rows = [[row.name, printable(row.words), row.tone] for row in live_rows(job, self._watched.steps_s)]
        title = printable(live_line(job))
        # A number of nanoseconds is more than a script's numbers hold.
        return {"rows": rows, "title": title, "is_old": job.is_stale, "page": str(changed_ns)}

    def _report(self) -> str | None:
        page = self._watched.page
        return None if page is None or not page.exists() else files.read_bytes(page).decode("utf-8", "replace")


class Handler(BaseHTTPRequestHandler):
    """Answers GET; http.server refuses all other methods."""

    server: LiveServer
    server_version, sys_version = "pipette", ""
    timeout = 10

    def do_GET(self) -> None:
        """Send a page, unless the browser was led here under another name."""
        host = self.headers.get("Host", "")
        name, colon, port = host.rpartition(":")
        if (name if colon and port.isdigit() else host) not in HOSTS:
            self._send(HTTPStatus.FORBIDDEN, "open the address that pipette watch printed\n", "text/plain")
            return
        found = self.server.answer(self.path)
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, "open the address that pipette watch printed\n", "text/plain")
        else:
            self._send(HTTPStatus.OK, *found)

    def _send(self, status: HTTPStatus, body: str, kind: str) -> None:
        data = body.encode()
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Keep the terminal free of requests."""
