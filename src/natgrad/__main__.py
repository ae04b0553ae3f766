"""``python -m natgrad`` is the command ``natgrad``."""

from natgrad.cli import main

main()
