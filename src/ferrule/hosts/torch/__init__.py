"""torch's arrays, and ops in its graphs, exports and packages.

In torch an op is `ferrule::<name>_<digest>` (`hosts.torch.op`), defined when the op first meets
torch. Dynamo traces `Op.__call__` and calls `Op._register`, which is marked as a constant, so
that an op may meet torch inside a compiled function. The fake implementation evaluates the same
rule on symbolic sizes (`SymInts`), which adds no guards but the rule's own equalities. The digest
covers what changes behaviour, derivative rules included; a rule that is declared later makes
another op. Of a rule in Python it cannot cover all, so Dynamo's graphs then hold a function around
the operator (`hosts.torch.kernels.traced_call`), with which AOTAutograd keeps no graph on disk.

An eager call runs in C (`runtime/torch_calls.c`): a function of a pool, one per op, binds
the rule's bytecode, makes the outputs and launches. What a kernel became for some dtypes, template
values and form of launch is an entry in the op's table; where there is none, and where something is
wrong, C asks Python (`kernels.entries`), which makes the entry or words the error.

A graph that was decomposed calls an op that writes in place through `auto_functionalized_v2`, which
names the tensors that it writes to as views of others; `package` makes these views again, to
know them.
"""
