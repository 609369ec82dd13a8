"""`python -m ares_exp.snapshots`."""

import sys

from ares_exp.snapshots.commands.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
