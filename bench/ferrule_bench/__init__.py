"""``ferrule bench``: kernels against who else does the same work, measured in the same run."""
