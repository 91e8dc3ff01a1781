"""The served page, asked over loopback."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from browser import CHROMIUM, Browser
from launch.display.test_metrics import printed
from launch.live.test_figures import kept
from pages import drawn

from pipette_launch.errors import UsageError
from pipette_launch.launch.live.server import LiveServer
from pipette_launch.launch.live.watched import Watched


@contextmanager
def serving(root: Path, *, has_page: bool = True) -> Iterator[LiveServer]:
    """A server of a job that trains."""
    metrics = kept(root)
    metrics.iterated(printed(30, 2.0))
    metrics.refresh()
    if has_page:
        (root / "k" / "report.html").write_text(drawn().html)
    with LiveServer(Watched(root), 0) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(
    server: LiveServer, name: str = "", *, path: str | None = None, host: str | None = "", method: str = "GET"
) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of an answer; `host` None sends none, and empty the right one."""
    folder = "/" + server.url.split("/", 3)[3]
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, folder + name if path is None else path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def test_page_and_figures_are_served_to_this_machine(tmp_path: Path) -> None:
    """The report with the strip, under a policy that lets it ask its own server alone."""
    with serving(tmp_path) as server:
        status, html, headers = asked(server)
        figures = json.loads(asked(server, "status.json")[1])
        assert "127.0.0.1" == server.server_address[0]

    assert 200 == status
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert [True] == ["connect-src 'self'" in one and "default-src 'none'" in one for one in policy]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "connect-src" not in drawn().html
    assert html.count('id="live"') == html.count('id="choice"') == 1
    assert ["Iteration", "30 of 100"] == [part[:9] for part in figures["rows"][3][:2]]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.2", None])
def test_a_page_of_another_site_cannot_ask(tmp_path: Path, host: str | None) -> None:
    """A name that was made to lead here is refused, on both paths."""
    with serving(tmp_path) as server:
        assert [403, 403] == [asked(server, name, host=host)[0] for name in ("", "status.json")]


def test_names_of_this_machine_may_ask(tmp_path: Path) -> None:
    """With and without a port, as behind a tunnel of ssh."""
    with serving(tmp_path) as server:
        for host in ("localhost", "localhost:8000", "127.0.0.1", "[::1]", "[::1]:80"):
            assert 200 == asked(server, host=host)[0], host


def test_nothing_else_is_there(tmp_path: Path) -> None:
    """No other method, no listing, no file, and nothing without the secret folder."""
    with serving(tmp_path) as server:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            assert 501 == asked(server, method=method)[0], method
        folder = "/" + server.url.split("/", 3)[3]
        others = ("/", "/status.json", "/report.html", folder[:-1], f"{folder}plan.json", f"{folder}?x")
        traversals = (f"{folder}../k/metrics.prom", f"{folder}%2e%2e/%2e%2e/etc/passwd", "/../../etc/passwd", "//etc")
        for path in (*others, *traversals, "/\xff"):
            status, text, _ = asked(server, path=path) if path.isascii() else (404, "", {})
            assert (404, False) == (status, "root:" in text or "pipette_" in text), path
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as raw:
            raw.sendall(b"GET /\xff\xfe HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert b"404" in raw.recv(100)


def test_without_a_report_there_are_figures(tmp_path: Path) -> None:
    """During a warm-up; and a report of another version is named."""
    with serving(tmp_path, has_page=False) as server:
        assert "There is no report yet." in asked(server)[1]
        (tmp_path / "k" / "report.html").write_text("<html>")
        assert "of another version" in asked(server)[1]


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    """It names the flag."""
    with serving(tmp_path) as server, pytest.raises(UsageError, match=f"--serve {server.server_port}: "):
        LiveServer(Watched(tmp_path), server.server_port)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_the_figures(tmp_path: Path) -> None:
    """The script fills the strip, and nothing is against the policy of the page."""
    with serving(tmp_path) as server, Browser(tmp_path / "profile") as browser:
        browser.open_address(server.url)
        text = ""
        for _ in range(200):
            text = str(browser.run("document.getElementById('live-rows').textContent"))
            if "30 of 100" in text:
                break
        assert "30 of 100" in text
        said = browser.run("[...document.querySelectorAll('#live-rows > *')].map((one) => one.tagName)")
        assert ["DT", "DD"] * (len(said) // 2) == said
        assert [] == [error for error in browser.errors if "favicon" not in error]
