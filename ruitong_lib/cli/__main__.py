"""``python -m ruitong_lib.cli``."""

from ruitong_lib.cli import main

if __name__ == "__main__":
    main()
