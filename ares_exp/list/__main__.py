"""`python -m ares_exp.list`."""

import sys

from ares_exp.listing.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
