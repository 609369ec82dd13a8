"""`python -m ares_exp.sweeps`."""

import sys

from ares_exp.sweeps.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
