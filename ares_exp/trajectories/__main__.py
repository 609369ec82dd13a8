"""`python -m ares_exp.trajectories`."""

import sys

from ares_exp.trajectories.commands.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
