"""`python -m tests.inventory`."""

import sys

from tests.inventory.make import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
