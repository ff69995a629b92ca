"""python -m trine: the same as the command `trine`."""

from .cli import main

if __name__ == "__main__":
    main()
