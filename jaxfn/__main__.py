"""Runs the command line: `python -m jaxfn`."""

import sys

from jaxfn._cli import main

if __name__ == "__main__":
    sys.exit(main())
