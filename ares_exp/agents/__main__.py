"""`python -m ares_exp.agents`."""

import sys

from ares_exp.agents.toolbox.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
