"""`python -m ballast` is `ballast`."""

import sys

from ballast.commands import main

if __name__ == "__main__":
    sys.exit(main())
