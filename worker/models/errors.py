"""What can be wrong with a model on disk."""


class ModelError(Exception):
    """A model that cannot be served; the message says what was found and what is supported."""


class ConfigError(ModelError):
    """The description of the model: an unknown architecture, feature or value."""


class WeightsError(ModelError):
    """The tensors of the model: a file format, a name, a shape or a type."""
