"""How bytes, seconds and rates are printed; inside the product everything is SI."""

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
