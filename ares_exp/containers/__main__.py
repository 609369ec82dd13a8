"""`python -m ares_exp.containers`."""

import sys

from ares_exp.containers.clean import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
