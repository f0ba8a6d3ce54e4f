#include "benchmarks/harness/measure.h"

#include <ballast/error.h>

#include <sys/mman.h>
#include <sys/resource.h>

#include <catch2/catch.hpp>
#include <cstring>

#include "kernels/runtime/buffer.h"
#include "tests/mebibyte.h"
#include "tests/runtime/process.h"

using namespace ballast;
using namespace ballast::benchmarks;

namespace {

ballast::Buffer allocate_here(std::size_t bytes) {
  static MemoryAccounts accounts;
  return allocate(accounts, {.bytes = bytes, .owner = "a test"});
}

// Makes fresh memory resident without Ballast's own checks, as any library may do.
bool kernel_gives(std::size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  std::memset(memory, 1, bytes);
  return munmap(memory, bytes) == 0;
}

}  // namespace

TEST_CASE("resident memory is measured, and its peak after it is freed") {
  const ResidentMemory before = resident_memory();
  CHECK(before.of_files > 0);
  CHECK(before.of_files < before.now);
  { CHECK(allocate_here(256 * mebibyte).bytes() > 0); }
  const ResidentMemory after = resident_memory();
  CHECK(after.peak >= before.now + 250 * mebibyte);
  CHECK(after.now < before.now + 50 * mebibyte);
  if (forget_peak()) CHECK(resident_memory().peak < before.now + 100 * mebibyte);
}

TEST_CASE("a process with a limit of private memory cannot take more, by mmap() or as a buffer") {
  CHECK(in_child([] {
          const std::size_t limit = own_bytes("VmSize:") + 256 * mebibyte;
          if (!kernel_gives(512 * mebibyte)) return 1;
          const rlim_t of_private_memory = limit - (own_bytes("VmSize:") - own_bytes("VmData:"));
          const rlimit both{of_private_memory, of_private_memory};
          setrlimit(RLIMIT_DATA, &both);
          const bool peak_is_of_now_on = forget_peak();
          if (!kernel_gives(64 * mebibyte)) return 2;
          if (kernel_gives(512 * mebibyte)) return 3;
          const ballast::Buffer held = allocate_here(128 * mebibyte);
          try {
            allocate_here(160 * mebibyte);
            return 4;
          } catch (const ResourceError& error) {
            if (error.code() != Code::host_memory) return 5;
          }
          return !peak_is_of_now_on || resident_memory().peak <= limit ? 0 : 6;
        }) == 0);
}
