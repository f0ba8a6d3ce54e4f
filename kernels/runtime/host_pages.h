// Anonymous host memory directly from the kernel: exact to the page, resident before use, and freed immediately.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace ballast {

// Makes host memory resident on several threads, because one core clears pages at a fraction of the memory's speed.
// Makes writable pages of whole huge or small pages resident, on at most `threads` threads and on at most 16; 0: on one
// for each core that this process may use. If the system refuses a thread, the others do its work. Returns the first error
// (errno); 0 if all pages are resident. Any thread may call.
int populate(std::span<std::byte> pages, int threads);

inline constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

struct Unmap {
  std::size_t bytes = 0;
  void operator()(std::byte* pages) const noexcept;
};
using HostPages = std::unique_ptr<std::byte[], Unmap>;

// When pages become resident: at allocation, or at the first write to each.
enum class Resident { at_once, when_written };

// Returns zeroed pages on the memory nodes of the cores, or else of the cores of this thread. From 4 MiB on they are
// aligned to 2 MiB, and huge if the kernel has huge pages: direct I/O into huge pages is up to twice as fast. For 0
// bytes it returns null. Pages become resident on `threads` threads (see populate()). Throws B2001 if the machine or
// the container has too little memory. Any thread may call.
HostPages map_host_pages(std::size_t bytes, std::string_view owner, Resident resident = Resident::at_once,
                         int threads = 1, const std::vector<int>& cores = {});

// Makes pages zero and not resident, until each is written again.
void clear_and_release(const HostPages& pages);

// Lets the kernel take pages that are idle when memory gets short, each with its content: it is then zero. Until then, pages are
// used again without a page fault for each. A write ends this for its page.
void release_when_short(const HostPages& pages);

// Excludes pages that a device writes from forked children: else a fork would copy each of them.
void hide_from_children(const HostPages& pages);

}  // namespace ballast
