"""Stand-in for Python in a launcher's workers: a training, or a measuring worker, that imports almost nothing.

All workers connect to the worker of RANK 0 and fail when this connection breaks, as under gloo. Each event is a line
in the file EVENTS: seconds of the monotonic clock, name, RANK, WORLD_SIZE.
"""

# ruff: noqa: PTH104, PTH110, PTH120, PTH123
# Pathlib takes longer to import than the rest takes to run.

import os
import select
import socket
import sys
import time

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = os.environ["MANY_FOLDER"]
STEP_S, ITERATIONS = float(os.environ["MANY_STEP_S"]), 100000
ROUND = f"{os.environ['MASTER_ADDR']}-{os.environ['MASTER_PORT']}"


def tell(what: str) -> None:
    """Note an event with one write, so that lines of many workers do not mix."""
    line = f"{time.monotonic():.3f} {what} {RANK} {WORLD}\n".encode()
    file = os.open(f"{FOLDER}/events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line)
    os.close(file)


def meet() -> list:
    """Connect all workers to RANK 0; return the connections after all have come."""
    place = f"{FOLDER}/round-{ROUND}"
    if RANK == 0:
        with socket.create_server(("", 0), backlog=WORLD) as server:
            with open(f"{place}.new", "w") as file:
                file.write(str(server.getsockname()[1]))
            os.rename(f"{place}.new", place)
            found = [server.accept()[0] for _ in range(WORLD - 1)]
    else:
        while not os.path.exists(place):
            time.sleep(0.05)
        with open(place) as file:
            port = int(file.read())
        try:
            found = [socket.create_connection((os.environ["MASTER_ADDR"], port))]
        except OSError:
            fail()
    together(found)
    return found


def together(found: list) -> None:
    """Wait until all workers have come to this point."""
    for one in found:
        if RANK:
            one.sendall(b".")
        hear(one)
    if not RANK:
        for one in found:
            one.sendall(b".")


def hear(one: socket.socket) -> None:
    """Wait for another worker's byte; fail if the worker is gone."""
    try:
        is_there = bool(one.recv(1))
    except OSError:
        is_there = False
    if not is_there:
        fail()


def fail() -> None:
    """End as a worker of gloo does whose peer is gone."""
    sys.stderr.write("RuntimeError: [pair.cc:534] Connection closed by peer\n")
    sys.exit(1)


def train() -> None:
    """Print iterations as Megatron does, on the last rank, until the file `end` exists."""
    tell("train")
    found = meet()
    poll = select.poll()
    for one in found:
        poll.register(one, select.POLLIN)
    for iteration in range(1, ITERATIONS):
        # Only RANK 0 decides the end, and the other workers end when RANK 0 says so.
        broken = poll.poll(1e3 * STEP_S)
        if RANK and broken:
            hear(found[0])
            break
        if broken:
            fail()
        if RANK == WORLD - 1:
            line = f" iteration {iteration:8d}/{ITERATIONS:8d} | elapsed time per iteration (ms): {1e3 * STEP_S:.1f} |"
            sys.stdout.write(f"{line} lm loss: 1.0E+00 |\n")
            sys.stdout.flush()
            if iteration == 1:
                tell("iteration")
        if not RANK and os.path.exists(f"{FOLDER}/end"):
            for one in found:
                one.sendall(b".")
            for one in found:
                one.recv(1)
            break
    tell("done")


def measure(order: str) -> None:
    """Let RANK 0 draw the measurements while all wait; then end together."""
    tell("measure")
    progress = f"{os.path.dirname(order)}/progress"
    with open(f"{FOLDER}/sign") as file:
        sign = file.read().replace("12345.5", f"{time.monotonic():.3f}")
    with open(f"{progress}/.new", "w") as file:
        file.write(sign)
    os.rename(f"{progress}/.new", f"{progress}/0.sign")
    found = meet()
    if not RANK:
        import subprocess

        words = [os.environ["MANY_PYTHON"], "-m", "benchmarks.launchers.measuring", order]
        subprocess.run(words, check=True, cwd=os.environ["MANY_ROOT"])
    together(found)
    tell("measured")


if "pipette_launch.probe.run" in sys.argv:
    measure(sys.argv[sys.argv.index("pipette_launch.probe.run") + 1])
else:
    train()
