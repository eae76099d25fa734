"""``python -m overlord``: the command line, where a script folder is not on the path."""

from overlord.cli.main import main

if __name__ == "__main__":
    main()
