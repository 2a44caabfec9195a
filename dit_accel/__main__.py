"""``python -m dit_accel`` is ``dit-accel``."""

from dit_accel.cli import main

if __name__ == "__main__":
    main()
