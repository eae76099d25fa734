"""``python -m overlord``: the command line without an installed script."""

from overlord.cli.main import main

if __name__ == "__main__":
    main()
