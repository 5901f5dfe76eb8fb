"""`python -m pacorl` is the command line."""

from pacorl.cli import main

if __name__ == "__main__":
    main()
