"""What all tests share: the GPU switch, and small facts to build on."""

import signal

import pytest
from hypothesis import settings

# A shared machine makes any single example slow now and then; pytest-timeout bounds the whole.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

# A shell lets what it runs in the background, and all below it, ignore Ctrl-C: then no process could be tested with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch that lets GPU tests run."""
    parser.addoption("--run-gpu", action="store_true", help="run the tests that need a CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests, with the reason, unless they were asked for."""
    if config.getoption("--run-gpu"):
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; run with --run-gpu on a machine that has one")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests had no laboratory of network namespaces, and why: a green run without them says less."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = [str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple)]
    unlabbed = [reason for reason in reasons if "netlab: " in reason]
    if unlabbed:
        terminalreporter.write_line(f"{len(unlabbed)} tests skipped for want of network namespaces ({unlabbed[0]})")
