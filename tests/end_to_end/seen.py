"""Writes down all that a worker sees of its launcher, says a few words, and fails or waits where it is told to."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

VARIABLES = dict(os.environ)
ATTEMPT, NODE, PLACE = (VARIABLES[name] for name in ("TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "RANK"))


def hears(address: str, port: str) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError), socket.create_connection((address, int(port)), timeout=5):
        return True
    return False


record = {
    "argv": sys.argv[1:],
    "script": sys.argv[0],
    "is_module": bool(__spec__),
    # A forked function has the command line of its launcher.
    "interpreter": None if multiprocessing.parent_process() else sys.orig_argv[: -len(sys.argv)],
    "folder": os.getcwd(),  # noqa: PTH109
    "variables": VARIABLES,
    "agent_hears": hears("127.0.0.1", VARIABLES["PORT"]),
    "store_hears": hears(VARIABLES["MASTER_ADDR"], VARIABLES["MASTER_PORT"]),
    "is_spawned": "--multiprocessing-fork" in sys.orig_argv,
    "at_s": time.time(),
}
for stream, fruit in ((sys.stdout, "apple"), (sys.stderr, "plum")):
    for word in (fruit, "stone"):
        stream.write(f"said: rank {PLACE} {word}\n")
    stream.flush()
Path(VARIABLES["SEEN"], f"{ATTEMPT}-{NODE}-{PLACE}.json").write_text(json.dumps(record))
if VARIABLES.get("WAITS"):
    signal.signal(signal.SIGUSR1, lambda *_: Path(VARIABLES["SEEN"], f"signal-{PLACE}").write_text("SIGUSR1"))
    Path(VARIABLES["SEEN"], f"ready-{PLACE}").write_text("")
    while True:
        time.sleep(0.1)
if ATTEMPT == VARIABLES.get("FAILS_IN", "") and PLACE == "1":
    # Its launcher ends the other worker for it, which may start later on a busy machine.
    while not Path(VARIABLES["SEEN"], f"{ATTEMPT}-{NODE}-0.json").exists():
        time.sleep(0.05)
    sys.exit(7)
