"""The CPU: C++ of a kernel, compiled, loaded, and run by the runtime's threads.

`source.rewrite` turns Metal's words into C++ token by token, and `include/ferrule.h` gives the rest
of the dialect its meaning. `devices.cpu.program` then chooses, per launch:

- flat (`source.loops.flat`): where no thread waits for another. One loop over x. What is the same
  in all its rounds stands before it, and divisors by what is the same are prepared
  (`include/divide.h`).

- split (`source.loops.split`): where there are barriers or simd operations, control flow that can
  be split. The loop over threads is split at each of them; what a thread keeps in between lies in
  arrays; threads that go different ways are told apart by masks. A unit of work is a simdgroup
  where that is allowed, else a threadgroup.

- fibers (`include/fiber.h`): everything else. Each thread of a threadgroup is a fiber with a
  stack of its own.

Bodies that divide their x by the length of a row (`elem / C`, `elem % C`) are written a second time
for units that lie in one row (`source.loops.rows`): there the quotient and all that depends on it,
branches and loops included, is the same for all lanes, elements that follow each other are reached
by one pointer, and atomic additions to them are made together: under a lock per page of memory
where the array gets nothing but additions, else with instructions that change a word at a time.
Which text runs is decided unit by unit.

`source.loops.uniform` and `source.loops.analysis` find out what is the same in all lanes of a unit;
`source.loops.splitter` and `source.loops.flat` write the loops. `ferrule inspect` shows the text,
and says which way was taken, and why not split. All three ways give the same bits; a fuzzer
compares them (`tests/fuzz`).

The cache holds each kernel twice: a *request* (kernel, spec, form of the launch, digests of the
generator, the header, the compiler and the processor) leads to the digest of a text without that
text being written, and the text's digest leads to the library. A warm start therefore parses
nothing and runs no compiler, and does not import what would: `devices.cpu.build` and
`devices.cuda.build`, and with them the texts' rooms, are imported where the cache has nothing. The
library is loaded from the bytes that were verified (`loader`).

A kernel may read outside its arrays (documentation's own example loads border pixels before it
discards them); where that hits unmapped memory it reads zeros. A write there ends the launch with a
`DeviceError`; an integer division by zero gives some value, as Metal has it (`runtime/faults.h`).
"""
