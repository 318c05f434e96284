// The library's thread pool: one parallel loop, called by handlers that run on XLA's threads.
//
// Contract: the caller takes part and claims tasks like everyone else, so a loop ends even when no pool thread ever
// runs; many callers (several ranks of one process) may loop at once; a loop inside a loop runs inline. Tasks are
// claimed from an atomic counter, so a body must not care which thread runs it. Every task sees the default floating
// point mode (round to nearest, subnormals kept): XLA flushes subnormals on its own threads, and bits must not depend
// on who claimed a task. Trade-off: one shared queue, thus tasks should be tens of microseconds or more.
#pragma once

#include <cstdint>
#include <functional>

namespace streammoe::cpu {

// Cores in the affinity mask of this process, at least 1.
int default_threads();

// Runs body(0) .. body(n - 1) on up to `threads` threads, the caller among them, and returns when all have ended.
// The body must not throw.
void parallel_for(int threads, int64_t n, const std::function<void(int64_t)>& body);

}  // namespace streammoe::cpu
