"""`python -m ballast` runs the command `ballast`."""

import sys

from ballast.tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
