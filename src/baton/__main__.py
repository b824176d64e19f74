"""`python -m baton` is the `baton` command."""

from baton.cli.main import main

if __name__ == "__main__":  # engines that start processes have this module imported again in each
    main()
