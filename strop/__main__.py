"""`python -m strop`: the command line where no script `strop` is installed."""

import sys

from strop.cli import main

sys.exit(main())
