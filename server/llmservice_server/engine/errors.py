"""What may stop the engine from starting. Each message is one sentence for the person who started it."""


class StartError(Exception):
    """The engine cannot start; the message says what is wrong, what was expected and what to do."""


class ConfigError(StartError):
    """A setting is out of range, or two settings contradict each other."""


class ModelLoadError(StartError):
    """The model folder is missing something, is broken, or holds a model that this server cannot run."""


class OutOfMemoryError(StartError):
    """Weights and KV cache do not fit into the memory that the engine may use."""
