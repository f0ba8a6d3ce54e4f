// Makes host memory resident on several threads, because one core clears pages at a fraction of the memory's speed.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace ballast {

// Makes writable pages of whole huge or small pages resident, on at most `threads` threads and on at most 16; 0: on one
// for each core that this process may use. If the system refuses a thread, the others do its work. Returns the error
// (errno) of each thread that failed: none if all pages are resident. Any thread may call.
std::vector<int> populate(std::span<std::byte> pages, int threads);

}  // namespace ballast
