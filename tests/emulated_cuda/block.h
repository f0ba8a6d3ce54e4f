// The threads of a block, as fibers of one thread of the host: each runs until it has to wait for others, and which of
// those that can run comes next is a matter of chance.
#pragma once

#include "tests/emulated_cuda/include/kernel_language.h"

namespace emulated {

void run_block(unsigned threads, const Thread& thread);

}  // namespace emulated
