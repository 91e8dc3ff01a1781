"""Which tests need a laboratory of network namespaces, and why they may not have one."""

from __future__ import annotations

import pytest

from benchmarks import netlab

REASON = netlab.missing()
needs_lab = pytest.mark.skipif(bool(REASON), reason=f"netlab: {REASON}")
