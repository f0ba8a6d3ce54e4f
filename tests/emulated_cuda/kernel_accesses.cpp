#include "tests/emulated_cuda/kernel_accesses.h"

#include <array>
#include <bit>
#include <map>

#include "tests/emulated_cuda/device_memory.h"
#include "tests/emulated_cuda/emulated.h"

namespace emulated {
namespace {

constexpr std::size_t page = 4096;
using Bits = std::array<std::uint64_t, page / 64>;  // one for each byte

struct Page {
  Bits read{};
  Bits written{};
};

// Adds the ranges of bytes whose bits are set, and joins those that touch.
template <class WordOf>
void add_ranges(std::vector<Access>& ranges, const std::byte* first, bool writes, WordOf word_of) {
  for (std::size_t index = 0; index < page / 64; ++index) {
    std::uint64_t word = word_of(index);
    for (unsigned at = 0; word != 0;) {
      const auto zeros = static_cast<unsigned>(std::countr_zero(word));
      const auto ones = static_cast<unsigned>(std::countr_one(word >> zeros));
      const std::byte* const begin = first + index * 64 + at + zeros;
      Access* const last = ranges.empty() ? nullptr : &ranges.back();
      if (last != nullptr && static_cast<const std::byte*>(last->memory) + last->bytes == begin) {
        last->bytes += ones;
      } else {
        ranges.push_back({begin, ones, writes});
      }
      at += zeros + ones;
      word = at == 64 ? 0 : word >> zeros >> ones;
    }
  }
}

}  // namespace

class KernelAccesses::Pages {
 public:
  void add(std::uintptr_t address, std::size_t bytes, bool writes) {
    while (bytes > 0) {
      Page& touched = page_at(address / page);
      const std::size_t first = address % page, count = std::min(bytes, 64 - first % 64);
      const std::uint64_t ones = count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
      (writes ? touched.written : touched.read)[first / 64] |= ones << first % 64;
      address += count;
      bytes -= count;
    }
  }

  // Bytes that are both read and written count as written.
  std::vector<Access> ranges() const {
    std::vector<Access> written, all;
    for (const auto& each : pages_) {
      const Page& touched = each.second;
      const auto* const first = reinterpret_cast<const std::byte*>(each.first * page);
      add_ranges(written, first, true, [&](std::size_t index) { return touched.written[index]; });
      add_ranges(all, first, false, [&](std::size_t index) { return touched.read[index] & ~touched.written[index]; });
    }
    all.insert(all.end(), written.begin(), written.end());
    return all;
  }

 private:
  struct Found {
    std::uintptr_t number = 0;
    Page* page = nullptr;
  };

  Page& page_at(std::uintptr_t number) {
    Found& found = found_[number % found_.size()];
    if (found.page == nullptr || found.number != number) found = {number, &pages_[number]};
    return *found.page;
  }

  std::map<std::uintptr_t, Page> pages_;  // by their number
  std::array<Found, 64> found_{};         // makes most searches short
};

namespace {

thread_local KernelAccesses::Pages* recording = nullptr;
thread_local WorkAddresses of_work{};

}  // namespace

void record(const void* address, std::size_t bytes, bool writes) {
  if (recording == nullptr) return;
  const std::uintptr_t from_first = reinterpret_cast<std::uintptr_t>(address) - of_work.first;
  if (from_first < of_work.bytes) recording->add(of_work.known_to_programs + from_first, bytes, writes);
}

KernelAccesses::KernelAccesses() : pages_(std::make_unique<Pages>()) {
  of_work = work_addresses();
  recording = pages_.get();
}

KernelAccesses::~KernelAccesses() { recording = nullptr; }

std::vector<Access> KernelAccesses::ranges() const { return pages_->ranges(); }

bool are_kernels_recorded() {
#ifdef EMULATED_KERNELS_ARE_RECORDED
  return true;
#else
  return false;
#endif
}

}  // namespace emulated

#ifdef EMULATED_KERNELS_ARE_RECORDED
// NOLINTBEGIN(bugprone-reserved-identifier): the names are those of ThreadSanitizer's runtime
#define ACCESSES_OF(bytes)                                                                      \
  void __tsan_read##bytes(void* address) { emulated::record(address, bytes, false); }           \
  void __tsan_write##bytes(void* address) { emulated::record(address, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* address) { emulated::record(address, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* address) { emulated::record(address, bytes, true); }

extern "C" {
ACCESSES_OF(1)
ACCESSES_OF(2)
ACCESSES_OF(4)
ACCESSES_OF(8)
ACCESSES_OF(16)
void __tsan_read_range(void* address, std::size_t bytes) { emulated::record(address, bytes, false); }
void __tsan_write_range(void* address, std::size_t bytes) { emulated::record(address, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
// The part of a kernel's source that runs on the host: static variables and shared pointers.
std::uint8_t __tsan_atomic8_load(const volatile std::uint8_t* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
std::uint32_t __tsan_atomic32_fetch_add(volatile std::uint32_t* address, std::uint32_t value, int) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
}
// NOLINTEND(bugprone-reserved-identifier)
#endif
