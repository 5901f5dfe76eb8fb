"""The command `python -m research.gpu_day`."""

import sys

from .day import main

sys.exit(main(sys.argv[1:]))
