"""`python -m trainer` is `incv`, so that any launcher can start it."""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
