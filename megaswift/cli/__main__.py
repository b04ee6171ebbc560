"""`python -m megaswift.cli`: the same as the console script."""

from megaswift.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
