"""What each command does, one file each. `gateway.cli` is the table of commands and their options."""


class CommandFailed(Exception):
    """What the user can mend: the message is the one line they see, and the exit code is 1."""
