"""`python -m pacorl.cli`: the command line for launchers that start a module (`torchrun -m pacorl.cli …`)."""

from __future__ import annotations

from pacorl.cli import main

if __name__ == "__main__":
    main()
