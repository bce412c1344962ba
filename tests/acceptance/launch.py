"""Becomes the command that it is given, and dies with the process that started it.

A test session that is killed can't stop its workers; without this they would go on and take the messages of
the next session. Run as a script, so that it costs a few milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        # It survives exec. It is bound to the thread that started us: start nodes from the main thread.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
