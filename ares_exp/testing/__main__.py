"""`python -m ares_exp.testing`."""

import sys

from ares_exp.testing.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
