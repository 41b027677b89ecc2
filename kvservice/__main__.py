"""`python -m kvservice` is the command line."""

import sys

from kvservice.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
