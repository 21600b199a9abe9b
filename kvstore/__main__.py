"""``python -m kvstore`` is the command ``kvstore``."""

from kvstore.cli.main import main

main()
