"""What goes wrong for reasons a user can do something about."""


class UsageError(Exception):
    """The request cannot be run as given; the message names the value and the cure."""
