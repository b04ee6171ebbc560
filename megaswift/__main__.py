"""`python -m megaswift`: the same as the console script."""

from megaswift.cli import main
from megaswift.error_exit import end_process

if __name__ == "__main__":
    end_process(main())
