"""What others wrote, made fit for our lines and screens: no control character of theirs reaches a terminal."""

from __future__ import annotations

import logging


def printable(text: str, *, keep: str = "") -> str:
    r"""Write everything that is not printed as its escape, `\x1b`: C0, C1, DEL, line ends, bidi and other marks.

    `keep` are characters that stay, such as the line ends of a text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else one.encode("unicode_escape").decode() for one in text)


class _Formatter(logging.Formatter):
    """Messages alone, as Python prints them where nobody has configured logging."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


def escape_log_lines() -> None:
    """Escape what log lines of this process quote."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter())


def log_for_debugging(package: str, head: str) -> None:
    """Let the modules of a package write all lines of their logs to stderr, each behind the same head."""
    logger, handler = logging.getLogger(package), logging.StreamHandler()
    handler.setFormatter(_Formatter(f"{head}%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
