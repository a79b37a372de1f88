"""`python -m minigpt_jax` is the command `minigpt`."""

import sys

from .cli import main

sys.exit(main())
