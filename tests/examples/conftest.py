"""The example's modules are imported as its script imports them: by their bare names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
