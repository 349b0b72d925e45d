"""python -m specengine: the command line."""

import sys

from specengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
