"""The command line ``dynpipe``: one file a command, each with ``add_parser`` and ``run``.

``main`` has the exit codes and turns a user's mistake into one line; ``command`` is what all commands share.
"""
