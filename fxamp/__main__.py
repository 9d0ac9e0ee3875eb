"""`python -m fxamp`: the command line."""

import sys

from fxamp.cli import main

if __name__ == "__main__":
    sys.exit(main())
