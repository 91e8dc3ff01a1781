"""A script that does what every training script does first, and then says that it got there."""

import os
import time
from pathlib import Path

import torch  # noqa: F401

Path(os.environ["BENCH_OUT"], os.environ["RANK"]).write_text(repr(time.time()))
