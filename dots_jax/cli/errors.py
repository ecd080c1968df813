"""The one exception that the command line turns into a line and exit code 2."""


class ArgumentError(Exception):
    """A command-line argument, or a file it names, cannot be used; the message is one line for the user."""
