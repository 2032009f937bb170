"""What is trained, how, and with what data."""

from labsupport.train.data import StoredImages

__all__ = ["StoredImages"]
