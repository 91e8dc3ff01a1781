"""How bytes, seconds and rates are printed; inside the product everything is SI."""

from __future__ import annotations

import logging

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def bytes_text(count: float) -> str:
    """Print a byte count in binary units, as memory is sold: `1.50 GiB`."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """Print a duration with three or four significant digits: `12.3 ms`."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def rate_text(bytes_per_s: float) -> str:
    """Print a bandwidth in decimal units, as links are sold: `11.8 GB/s`."""
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def flops_text(flops_per_s: float) -> str:
    """Print a rate of computing in decimal units: `451.2 TFLOP/s`."""
    for unit, size in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if flops_per_s >= size:
            return f"{flops_per_s / size:,.1f} {unit}"
    return f"{flops_per_s / 1e6:,.1f} MFLOP/s"


def count_text(count: float) -> str:
    """Print a large number with three digits and a decimal unit: `69.9 B`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


def hertz_text(hertz: float) -> str:
    """Print a clock rate: `1.98 GHz`, `345 MHz`."""
    return f"{hertz / 1e9:.3g} GHz" if hertz >= 1e9 else f"{hertz / 1e6:.3g} MHz"


def duration_text(seconds: float) -> str:
    """Print how long something goes on: `42 s`, `7 min`, `3 h 5 min`, `2 d 4 h`."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, hours = whole // 60, whole // 3600
    if hours < 1:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def plural(noun: str, count: int) -> str:
    """A noun that stands behind a number."""
    return noun if count == 1 else f"{noun}s"


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
