"""Rules: what an op declares, expressions over sizes, what a call binds, all that as bytecode.

`Rule.bind` checks a call's inputs and finds the sizes of its dims, `Rule.results` its outputs, in
Python (5 to 14 µs). `bytecode.compile_rule` writes the same rule as one list of int64, and
`runtime/rule.h` does all of that from it in 13 to 65 ns, without Python, an array library or an
allocation. It says yes or no; on a no, an overflow, or more dims than it has room for, the caller
asks `Rule.bind`, which words the error or goes on. Its arithmetic is `runtime/arithmetic.h`, where
divisions by zero and overflows become a status. Which inputs share memory with one that is written
in place is found by `runtime/arrays.h`, in eager calls and in packages.
"""
