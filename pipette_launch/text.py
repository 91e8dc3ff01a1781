"""Text for screens and logs: quantities, hints for mistyped words, and quoted text without control characters.

All quantities inside the product are in SI units.
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterable, Sequence

KIB = 1024
MIB = 1024**2
GIB = 1024**3
HEAD = "pipette-launch: "
"""Beginning of each line of the launcher."""


def say(words: str) -> None:
    """Print one line of the launcher to stderr."""
    sys.stderr.write(f"{HEAD}{printable(words)}\n")
    sys.stderr.flush()


def bytes_text(count: float) -> str:
    """Print a byte count in binary units, as memory is sold: `1.50 GiB`."""
    return _in_unit(count, (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)), ".2f") or f"{count:.0f} B"


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
    units = (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))
    return _in_unit(bytes_per_s, units, ".3g") or f"{bytes_per_s:.0f} B/s"


def flops_text(flops_per_s: float) -> str:
    """Print a compute rate in decimal units: `451.2 TFLOP/s`."""
    return _in_unit(flops_per_s, (("TFLOP/s", 1e12), ("GFLOP/s", 1e9)), ",.1f") or f"{flops_per_s / 1e6:,.1f} MFLOP/s"


def count_text(count: float) -> str:
    """Print a large number with three digits and a decimal unit: `69.9 B`."""
    return _in_unit(count, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)), ".3g") or f"{count:.3g}"


def _in_unit(value: float, units: Sequence[tuple[str, float]], form: str) -> str:
    """Print a value in the largest unit that is not larger than the value. The text is empty below all units."""
    return next((f"{value / size:{form}} {unit}" for unit, size in units if abs(value) >= size), "")


def hertz_text(hertz: float) -> str:
    """Print a clock rate: `1.98 GHz`, `345 MHz`."""
    return f"{hertz / 1e9:.3g} GHz" if hertz >= 1e9 else f"{hertz / 1e6:.3g} MHz"


def duration_text(seconds: float) -> str:
    """Print a long duration: `42 s`, `7 min`, `3 h 5 min`, `2 d 4 h`."""
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
    """Add an `s` to the noun unless the count is 1."""
    return noun if count == 1 else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Name a number of things: `1 host`, or `2 hosts`."""
    return f"{count} {plural(noun, count)}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Name things by their numbers: `stage 3`, or `stages 1, 2`."""
    return f"{plural(noun, len(numbers))} {', '.join(map(str, numbers))}"


def listed(words: Sequence[str], most: int) -> str:
    """Name at most the first `most` words, and count the rest: `a, b and 3 more`."""
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")


def joined(*sentences: str) -> str:
    """Join the sentences that are not empty."""
    return "; ".join(filter(None, sentences))


def nearest_word(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known word with the spelling nearest to `word`, or an empty string.

    `cutoff` is the least similarity of both words, 0 to 1, measured by `difflib`.
    """
    return "".join(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff))


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return `did you mean X?` for the nearest known word, or `otherwise` if no known word is similar."""
    near = nearest_word(word, known)
    return f"did you mean {near}?" if near else otherwise


def printable(text: str, *, keep: str = "") -> str:
    r"""Replace each unprintable character by an escape such as `\x1b`, so that text cannot control the terminal.

    Control characters, line ends and bidirectional marks are unprintable. Characters in `keep` are not replaced.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else one.encode("unicode_escape").decode() for one in text)


class _EscapingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


def escape_log_lines() -> None:
    """Format log messages of this process without a prefix, and with unprintable characters escaped."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_EscapingFormatter())


def log_for_debugging(package: str, head: str) -> None:
    """Write all log lines of a package to stderr. Each line begins with `head`."""
    logger, handler = logging.getLogger(package), logging.StreamHandler()
    handler.setFormatter(_EscapingFormatter(f"{head}%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
