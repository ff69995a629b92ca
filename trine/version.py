"""The version, for those that must not load the rest."""

__version__ = "0.1.0"
