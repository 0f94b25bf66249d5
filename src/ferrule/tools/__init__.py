"""Tools that know no kernel: the cache on disk, loading libraries, compilers, the runtime in C."""
