"""`python -m ares_exp.trackers`."""

import sys

from ares_exp.trackers.commands.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
