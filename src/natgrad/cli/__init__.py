"""The command ``natgrad``."""

from __future__ import annotations

import os
import sys

_NEEDED = ("rich", "tomli_w", "typer")


def main() -> None:
    """Runs the command line. Modules of the present folder can be named in recipes, as with ``python -m natgrad``."""
    sys.path.insert(0, os.getcwd())
    try:
        from natgrad.cli.app import app
    except ModuleNotFoundError as error:
        if error.name in _NEEDED:
            raise SystemExit(
                f'the command natgrad needs {error.name}: pip install "natgrad[cli]", or -e ".[cli]" in a clone'
            ) from None
        raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app()
