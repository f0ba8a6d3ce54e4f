// Anonymous host memory straight from the kernel: exact to the page, resident before it is used, given back at once.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

namespace ballast {

inline constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

struct Unmap {
  std::size_t bytes = 0;
  void operator()(std::byte* pages) const noexcept;
};
using HostPages = std::unique_ptr<std::byte[], Unmap>;

// When pages take memory: before they are used, or each when it is first written to.
enum class Resident { at_once, when_written };

// Zeroed pages, near the given NUMA nodes (none: near this thread's cores). From 4 MiB on they
// are aligned to 2 MiB and huge where the kernel has huge pages: direct I/O into huge pages is up to twice as fast.
// No bytes: a null pointer. More than the machine or the container can give is refused (B2001). Any thread may call.
HostPages map_host_pages(std::size_t bytes, std::string_view owner, std::span<const int> nodes = {},
                         Resident resident = Resident::at_once);

// For pages that a device writes: a fork would copy every one of them into the child.
void hide_from_children(const HostPages& pages);

}  // namespace ballast
