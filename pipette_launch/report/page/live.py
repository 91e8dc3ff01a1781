"""A report that is served while its job runs: the page from the disk, with a strip of live figures on top."""

from __future__ import annotations

from pipette_launch.report.page.page import POLICY, page_environment

LIVE_POLICY = f"{POLICY}; connect-src 'self'"
"""A served page asks its own server for figures, and nobody for anything else."""
TOP = "<header>\n"


def live_page(html: str | None) -> str:
    """Add the strip to a report.

    Args:
        html: the report; None where there is none yet, which gives a page with the strip alone.

    Raises:
        PipetteError: jinja2 is not installed.

    """
    environment = page_environment()
    before, top, after = (html or "").partition(TOP)
    if POLICY not in before or not top:
        why = "There is no report yet." if html is None else "The report is of another version and is not shown."
        return environment.get_template("alone.html").render(policy=LIVE_POLICY, why=why)
    strip = environment.get_template("strip.html").render()
    return before.replace(POLICY, LIVE_POLICY, 1) + strip + top + after
