"""The sanitizer: kernels run on the CPU with every access watched, and what that finds."""
