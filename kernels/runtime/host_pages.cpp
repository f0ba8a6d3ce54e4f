#include "kernels/runtime/host_pages.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>
#include <system_error>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "kernels/runtime/host_limits.h"
#include "kernels/runtime/machine.h"
#include "kernels/runtime/sizes.h"
#include "kernels/runtime/system_resources.h"

namespace ballast {

namespace {

constexpr std::size_t slice_bytes = std::size_t{32} << 20;  // whole huge pages, and some milliseconds of work
constexpr std::size_t most_threads = 16;  // reach the memory's speed; the ranks of a machine do this at the same time

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::size_t threads_for(std::size_t slices, int threads) {
  if (slices <= 1) return 1;
  const std::size_t wanted = threads > 0 ? static_cast<std::size_t>(threads) : usable_cores();
  return std::min({wanted, most_threads, slices});
}

// Whether kernels before 5.14, or a filter of system calls, have returned the error.
bool is_unavailable(int error) {
  return error == EINVAL || error == ENOSYS || error == EPERM || error == EACCES || error == EOPNOTSUPP;
}

// Returns 0, or the error.
int populate_slice(std::span<std::byte> pages) {
  if (madvise(pages.data(), pages.size(), MADV_POPULATE_WRITE) == 0) return 0;
  if (!is_unavailable(errno)) return errno;
  for (std::size_t offset = 0; offset < pages.size(); offset += page_bytes()) {
    *const_cast<volatile std::byte*>(pages.data() + offset) = std::byte{0};
  }
  return 0;
}

// Fails with the call that the kernel has refused. The host has the memory, as require_host_memory() has found.
[[noreturn]] void refuse(std::string_view call, std::size_t bytes, std::string_view owner, const HostLimits& limits,
                         int error) {
  const auto address_space = limits.address_space_bytes;
  fail(Code::host_memory,
       {.what = fmt::format("cannot allocate host memory: the kernel refuses {}: {}", call,
                            std::generic_category().message(error)),
        .where = std::string(owner),
        .needed = human_bytes(bytes),
        .available = address_space ? fmt::format("RLIMIT_AS is {} (`ulimit -v`)", human_bytes(*address_space)) : "",
        .remedy =
            fmt::format("The host has {} of free memory. Raise the limit that refuses it: `ulimit -v`, `ulimit -l`, "
                        "vm.overcommit_memory, vm.max_map_count, or a filter of system calls (seccomp).",
                        human_bytes(limits.available_bytes))});
}

// Maps a whole alignment more than is needed and gives both ends back. Returns MAP_FAILED as mmap does.
void* map_aligned(std::size_t bytes, std::size_t alignment) {
  const std::size_t excess = alignment - page_bytes();
  void* const mapped = mmap(nullptr, bytes + excess, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED || excess == 0) {
    return mapped;
  }
  const auto first = reinterpret_cast<std::uintptr_t>(mapped);
  const std::size_t before = round_up(first, alignment) - first;
  auto* const aligned = static_cast<std::byte*>(mapped) + before;
  if (before > 0) {
    munmap(mapped, before);
  }
  if (excess > before) {
    munmap(aligned + bytes, excess - before);
  }
  return aligned;
}

}  // namespace

int populate(std::span<std::byte> pages, int threads) {
  const std::size_t slices = (pages.size() + slice_bytes - 1) / slice_bytes;
  std::atomic<std::size_t> next = 0;
  std::atomic<int> first_error = 0;
  // Called by each thread. Returns when no slice is left, or after the first failure of any thread.
  const auto take_slices = [&] {
    for (std::size_t slice = next++; slice < slices && first_error == 0; slice = next++) {
      const std::size_t first = slice * slice_bytes;
      int none = 0;
      if (const int error = populate_slice(pages.subspan(first, std::min(slice_bytes, pages.size() - first))))
        first_error.compare_exchange_strong(none, error);
    }
  };
  std::vector<std::thread> helpers;
  const std::size_t count = threads_for(slices, threads) - 1;
  helpers.reserve(count);
  try {
    while (helpers.size() < count) {
      helpers.push_back(start_thread("populating host memory", take_slices));
    }
  } catch (const Error&) {  // the system allows no more threads: those that there are take all slices
  }
  take_slices();
  std::ranges::for_each(helpers, [](std::thread& helper) { helper.join(); });
  return first_error;
}

void Unmap::operator()(std::byte* pages) const noexcept { munmap(pages, bytes); }

HostPages map_host_pages(std::size_t bytes, std::string_view owner, Resident resident, int threads,
                         const std::vector<int>& cores) {
  if (bytes == 0) {
    return {};
  }
  const HostLimits limits = read_host_limits();
  require_host_memory(bytes, owner, limits);
  const std::size_t mapped_bytes = round_up(bytes, page_bytes());
  const bool huge = bytes >= 2 * huge_page_bytes;
  void* const mapped = map_aligned(mapped_bytes, huge ? huge_page_bytes : page_bytes());
  if (mapped == MAP_FAILED) {
    refuse("mmap()", bytes, owner, limits, errno);
  }
  HostPages pages(static_cast<std::byte*>(mapped), Unmap{mapped_bytes});
  if (huge) {
    madvise(pages.get(), mapped_bytes, MADV_HUGEPAGE);  // EINVAL if the kernel has none: then the pages are small
  }
  place_on_nodes(pages.get(), mapped_bytes, nodes_of_cores(cores.empty() ? allowed_cores() : cores));  // nice to have
  if (resident == Resident::at_once) {
    const int error = populate({pages.get(), mapped_bytes}, threads);
    if (error != 0) refuse("madvise(MADV_POPULATE_WRITE)", bytes, owner, limits, error);
  }
  return pages;
}

void clear_and_release(const HostPages& pages) { madvise(pages.get(), pages.get_deleter().bytes, MADV_DONTNEED); }

void release_when_short(const HostPages& pages) { madvise(pages.get(), pages.get_deleter().bytes, MADV_FREE); }

void hide_from_children(const HostPages& pages) { madvise(pages.get(), pages.get_deleter().bytes, MADV_DONTFORK); }

}  // namespace ballast
