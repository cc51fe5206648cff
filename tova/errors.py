"""The one exception a user is meant to read: a sentence that names the option, the value and what would be right."""


class UsageError(ValueError):
    """Something the caller asked for cannot be done; the message says what, and what can."""
