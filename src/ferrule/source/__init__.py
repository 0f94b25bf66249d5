"""Text: the Metal signature, and one C++ text that g++, clang and NVRTC read."""


class NotSplittable(Exception):
    """The control flow does not allow the split; says why."""
