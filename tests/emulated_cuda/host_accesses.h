// The host's accesses to pinned memory that work of a stream accesses: none until the host has waited for that work.
#pragma once

#include "tests/emulated_cuda/memory_order.h"

namespace emulated {

// The host may not write this pinned memory, nor read it if the work writes it, until let_host_in().
void keep_host_out(const Access& access, const IssuedPtr& work);
void let_host_in(const Clock& ended);  // the host knows that this work has ended
void let_host_into_unpinned(const void* memory, std::size_t bytes);

// Copies for work of a GPU, which may access what the host may not. The addresses are those of in_work().
void copy_in_work(void* to, const void* from, std::size_t bytes);

}  // namespace emulated
