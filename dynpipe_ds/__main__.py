"""``python -m dynpipe_ds``: the same as ``dynpipe``."""

import sys

from dynpipe_ds.cli.main import main

sys.exit(main())
