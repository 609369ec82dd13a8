"""`python -m ares_exp.ctl`."""

import sys

from ares_exp.ctl.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
