"""`python -m hessquant`, which is the command line."""

import sys

from hessquant.cli import main

if __name__ == "__main__":
    sys.exit(main())
