"""A stranger: a process without the secret of a job, which writes forged orders into every store of the job.

`python stranger.py RENDEZVOUS_PORT FORGED.json PID...`: FORGED.json is a decision; the processes hold the stores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
from torch.distributed import TCPStore

ORDERS = ("decision", "plan", "trial-1/next", "measured", "members")
FLAGS = (
    *("alarm", "warmup-alarm", "warmup-failed", "warmup-absent", "warmup-over", "over/warmup", "over/train"),
    *("iterated", "verdict", "trial-1/end", "trial-1/absent"),
)


def main(rendezvous_port: int, forged: str, pids: list[int]) -> None:
    """Write to all stores of these processes except the store of torch's rendezvous."""
    listening = [one for pid in pids for one in psutil.Process(pid).net_connections("tcp") if one.status == "LISTEN"]
    stores = [
        TCPStore(one.laddr.ip, one.laddr.port, is_master=False, wait_for_workers=False)
        for one in listening
        if one.laddr.port != rendezvous_port
    ]
    keys = {key for store in stores for key in store.list_keys()}
    rounds = {key.split("/")[1] for key in keys if key.endswith("/decision")}
    tokens = {key.split("/")[2] for key in keys if "/answer/" in key}
    for store in stores:
        store.set("pipette/round", "forged")
        for token in tokens:
            store.set(f"pipette/arrival/{token}", forged)
            store.set(f"pipette/answer/{token}/1", f"forged 0 1 {token}")
        for name in rounds:
            for key in ORDERS:
                store.set(f"pipette/{name}/{key}", forged)
            for key in (*FLAGS, *(f"{what}/{token}" for what in ("left", "lost") for token in tokens)):
                store.set(f"pipette/{name}/{key}", "before-first-iteration")
            store.set(f"pipette/{name}/store/train", "127.0.0.1 9")
    addresses = sorted(one.laddr.ip for one in listening if one.laddr.port != rendezvous_port)
    sys.stdout.write(json.dumps({"addresses": addresses, "rounds": len(rounds), "tokens": len(tokens)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]).read_text(), [int(word) for word in sys.argv[3:]])
