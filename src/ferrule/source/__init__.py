"""Text: the Metal signature, and one C++ text that g++, clang and NVRTC read."""
