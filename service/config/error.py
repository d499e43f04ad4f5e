"""The one error of settings that cannot work."""


class ConfigError(ValueError):
    """The message names the setting."""
