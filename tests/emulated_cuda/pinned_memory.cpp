#include "tests/emulated_cuda/pinned_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/emulated_cuda/calls.h"
#include "tests/emulated_cuda/devices.h"
#include "tests/emulated_cuda/host_accesses.h"
#include "tests/emulated_cuda/rules.h"

namespace emulated {
namespace {

constexpr std::size_t page = 4096;

struct Range {
  std::size_t bytes = 0;
  std::size_t copies = 0;  // copies under way
  bool is_shared = false;  // between processes
};

std::mutex mutex;  // guards the variables below
auto& ranges = never_destroyed<std::map<const std::byte*, Range>>();
std::size_t populated = 0;

// Returns the range that an address lies in, or null.
Range* range_around(const void* address) {
  const auto* const byte = static_cast<const std::byte*>(address);
  auto next = ranges.upper_bound(byte);
  if (next == ranges.begin()) return nullptr;
  --next;
  return byte < next->first + next->second.bytes ? &next->second : nullptr;
}

bool is_shared_mapping(const void* memory) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::uintptr_t begin = 0, end = 0;
    char to = 0;
    std::string rights;
    words >> std::hex >> begin >> to >> end >> rights;
    if (reinterpret_cast<std::uintptr_t>(memory) - begin < end - begin) return rights.back() == 's';
  }
  return false;
}

std::size_t missing_pages(void* memory, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(memory) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(memory) + bytes;
  std::vector<unsigned char> is_there((end - first + page - 1) / page);
  ::mincore(reinterpret_cast<void*>(first), end - first, is_there.data());
  std::size_t missing = 0;
  for (const unsigned char one : is_there) {
    missing += (one & 1) == 0 ? 1 : 0;
  }
  return missing;
}

}  // namespace

bool is_pinned(const void* address, std::size_t bytes) {
  const auto* const byte = static_cast<const std::byte*>(address);
  const std::lock_guard lock(mutex);
  auto next = ranges.upper_bound(byte);
  if (next == ranges.begin()) return false;
  --next;
  return byte + bytes <= next->first + next->second.bytes;
}

std::pair<const std::byte*, std::size_t> pinned_range_around(const void* address) {
  const auto* const byte = static_cast<const std::byte*>(address);
  const std::lock_guard lock(mutex);
  auto next = ranges.upper_bound(byte);
  if (next == ranges.begin()) return {};
  --next;
  const auto& [first, range] = *next;
  const bool is_in = byte < first + range.bytes && !range.is_shared;
  return is_in ? std::pair(first, range.bytes) : std::pair<const std::byte*, std::size_t>{};
}

bool is_being_copied(const void* address) {
  const std::lock_guard lock(mutex);
  const Range* const range = range_around(address);
  return range != nullptr && range->copies > 0;
}

void begin_copy(const void* address) {
  const std::lock_guard lock(mutex);
  if (Range* const range = range_around(address)) ++range->copies;
}

void end_copy(const void* address) {
  const std::lock_guard lock(mutex);
  if (Range* const range = range_around(address)) --range->copies;
}

std::size_t live_pinned_ranges() {
  const std::lock_guard lock(mutex);
  return ranges.size();
}

std::size_t pages_populated_by_pinning() {
  const std::lock_guard lock(mutex);
  return populated;
}

}  // namespace emulated

cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned) {
  return emulated::call("cudaHostRegister", emulated::Context::on_current, [&] {
    const auto* const first = static_cast<const std::byte*>(memory);
    const std::lock_guard lock(emulated::mutex);
    for (const auto& [other, range] : emulated::ranges) {
      if (first < other + range.bytes && other < first + bytes) return cudaErrorHostMemoryAlreadyRegistered;
    }
    emulated::populated += emulated::missing_pages(memory, bytes);
    emulated::ranges[first] = {.bytes = bytes, .is_shared = emulated::is_shared_mapping(memory)};
    return cudaSuccess;
  });
}

// A context that has failed has no work any more: what is left in its streams ends here.
cudaError_t cudaHostUnregister(void* memory) {
  return emulated::releasing_call("cudaHostUnregister", [&] {
    if (emulated::context_has_failed()) {
      for (const emulated::Device* const device : emulated::devices_with_context()) {
        emulated::wait_for_all_streams_of(device->gpu);
      }
    }
    const std::lock_guard lock(emulated::mutex);
    const auto found = emulated::ranges.find(static_cast<const std::byte*>(memory));
    if (found == emulated::ranges.end()) return cudaErrorHostMemoryNotRegistered;
    if (found->second.copies > 0) {
      emulated::broken("memory stays pinned while it is copied", "cudaHostUnregister came before the copy's end");
    }
    emulated::let_host_into_unpinned(memory, found->second.bytes);
    emulated::forget_accesses(memory, found->second.bytes);
    emulated::ranges.erase(found);
    return cudaSuccess;
  });
}
