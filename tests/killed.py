"""Runs `examples/recovery_loop.py` again and again, and kills it on the way: `killed.py FOLDER STEPS SEED
KILLS`.

It kills itself with SIGKILL at the n-th time that Python opens, renames or removes something in the folder, so that a
kill falls into a save, a rewind or a retirement as often as they touch the disk. All is imported once; each run is a
fork.
"""

import contextlib
import os
import random
import signal
import sys
from pathlib import Path

from examples.recovery_loop import train

TOUCHES = {
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.listdir",
    "os.scandir",
}


def run(folder: str, steps: int, kill_at: int | None) -> int | None:
    """Returns how often the folder was touched, or None if it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        touched = 0

        def watch(event: str, arguments: tuple) -> None:
            nonlocal touched
            if event in TOUCHES and arguments and folder in str(arguments[0]):
                touched += 1
                if touched == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            status = train(Path(folder), steps)
        os.write(write, str(touched).encode())
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        touched = pipe.read()
    _, status = os.waitpid(child, 0)
    if status == signal.SIGKILL:
        return None
    if status:
        sys.exit(f"ended with status {status} after a kill at touch {kill_at}")
    return int(touched)


if __name__ == "__main__":
    folder, steps, seed, kills = sys.argv[1], *map(int, sys.argv[2:])
    total = run(f"{folder}/whole", steps, None)
    chance, killed, tries = random.Random(seed), 0, 0
    while killed < kills:  # each folder until it is finished
        tries += 1
        while run(f"{folder}/killed-{tries}", steps, chance.randint(1, total)) is None:
            killed += 1
    print(killed, "kills in", tries, "folders")
