"""A process that ends with the one that started it. Run as a module, it is a participant: FLARE's own entry point.

A participant that is killed cannot end its job processes, nor `join` its participant: left alone they would go on for
ever, and hold the kit's lock.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time

PARENT = "PF2LORA_PARENT"  # the process that started a participant
LOOK = 1.0  # seconds between looks


def end_with(parent: int) -> None:
    """End this process when `parent` is no longer its parent, whatever it does then."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os._exit(1)  # what matters is on disk after every round

    threading.Thread(target=watch, name="pf2lora-parent", daemon=True).start()


def main() -> None:
    """`python -m pf2lora.federation.flare.child MODULE ARGUMENTS`: the module as a program."""
    end_with(int(os.environ.pop(PARENT, os.getppid())))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
