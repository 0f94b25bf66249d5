"""One launch, watched: the instrumented kernel, what it is given, what it tells, and where."""
