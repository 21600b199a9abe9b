"""The command line, ``kvstore``. Nothing is imported here, so that ``kvstore --help`` is quick."""
