#include "kernels/runtime/buffer.h"

#include <sys/resource.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/runtime/device.h"
#include "kernels/runtime/host_limits.h"
#include "kernels/runtime/host_pages.h"
#include "tests/mebibyte.h"
#include "tests/runtime/process.h"
#include "tests/skip.h"

using namespace ballast;

namespace {

bool is_aligned(const Buffer& buffer, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(buffer.data()) % alignment == 0;
}

// Returns 0 if the allocation is refused with the message, 1 if it succeeds, and 2 if it is refused with another
// message.
int refusal(std::size_t bytes, std::string_view message) {
  MemoryAccounts accounts;
  try {
    allocate(accounts, {.bytes = bytes, .owner = "test"});
    return 1;
  } catch (const ResourceError& error) {
    const bool expected =
        error.code() == Code::host_memory && std::string_view(error.what()).find(message) != std::string_view::npos;
    return expected ? 0 : 2;
  }
}

// Counts the bytes that it has given and not got back.
class CountingAllocator final : public Allocator {
 public:
  std::byte* allocate(std::size_t bytes) override {
    given_ += bytes;
    return static_cast<std::byte*>(::operator new(bytes, alignment));
  }
  void release(std::byte* memory, std::size_t bytes) noexcept override {
    given_ -= bytes;
    ::operator delete(memory, alignment);
  }
  std::size_t given() const { return given_; }

 private:
  static constexpr std::align_val_t alignment{256};
  std::size_t given_ = 0;
};

}  // namespace

TEST_CASE("a buffer in the memory of the caller's allocator is booked too") {
  CountingAllocator allocator;
  MemoryAccounts accounts;
  {
    const Buffer buffer = allocate(accounts, {.bytes = 1000, .owner = "moments", .allocator = &allocator});
    std::fill_n(buffer.data(), 1000, std::byte{0xAB});
    CHECK(allocator.given() == 1000);
    CHECK(accounts.usage(MemoryKind::pageable, "moments").now == 1000);
  }
  CHECK(allocator.given() == 0);
  CHECK(accounts.total(MemoryKind::pageable).now == 0);
}

TEST_CASE("a host buffer has exactly its size, aligned, zeroed and writable to its end") {
  MemoryAccounts accounts;
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{4095}, std::size_t{4097}, 3 * mebibyte, 4 * mebibyte, 5 * mebibyte + 1}) {
    const Buffer buffer = allocate(accounts, {.bytes = bytes, .owner = "moments"});
    INFO(bytes);
    CHECK(buffer.bytes() == bytes);
    CHECK(is_aligned(buffer, 4096));
    CHECK(is_aligned(buffer, bytes >= 2 * huge_page_bytes ? huge_page_bytes : 1));
    CHECK(std::all_of(buffer.data(), buffer.data() + bytes, [](std::byte b) { return b == std::byte{0}; }));
    std::fill_n(buffer.data(), bytes, std::byte{0xAB});
    CHECK(accounts.usage(MemoryKind::pageable, "moments").now == bytes);
  }
  CHECK(accounts.total(MemoryKind::pageable).now == 0);
  CHECK(accounts.total(MemoryKind::pageable).peak == 5 * mebibyte + 1);
}

TEST_CASE("host memory is resident at once, and no larger than requested") {
  MemoryAccounts accounts;
  const std::size_t bytes = 33 * mebibyte + 1;  // the next power of two is far away
  const std::size_t resident = own_bytes("VmRSS:");
  const std::size_t mapped = own_bytes("VmSize:");
  const Buffer buffer = allocate(accounts, {.bytes = bytes, .owner = "moments"});
  CHECK(own_bytes("VmRSS:") - resident >= bytes - mebibyte);
  CHECK(own_bytes("VmSize:") - mapped <= bytes + mebibyte);
}

TEST_CASE("a buffer of no bytes is valid") {
  MemoryAccounts accounts;
  for (const MemoryKind kind : {MemoryKind::device, MemoryKind::pinned, MemoryKind::pageable}) {
    const Buffer buffer = allocate(accounts, {.kind = kind, .owner = "empty parameter"});
    CHECK(buffer.data() == nullptr);
    CHECK(buffer.bytes() == 0);
    CHECK(buffer.kind() == kind);
    CHECK(buffer.view(DType::fp32).count() == 0);
  }
}

TEST_CASE("a moved-from buffer is empty") {
  MemoryAccounts accounts;
  Buffer first = allocate(accounts, {.bytes = 4 * mebibyte, .owner = "a"});
  std::byte* const data = first.data();
  Buffer second = std::move(first);
  CHECK(second.data() == data);
  CHECK(second.owner() == "a");
  CHECK(first.data() == nullptr);
  CHECK(first.bytes() == 0);
  CHECK_FALSE(first.pinned());
  second = allocate(accounts, {.bytes = 10, .owner = "b"});
  CHECK(accounts.usage(MemoryKind::pageable, "a").now == 0);
  CHECK(accounts.total(MemoryKind::pageable).now == 10);
  second = Buffer();
  CHECK(accounts.total(MemoryKind::pageable).now == 0);
}

TEST_CASE("a buffer is viewed as whole elements") {
  MemoryAccounts accounts;
  const Buffer buffer = allocate(accounts, {.bytes = 10, .owner = "a"});
  CHECK(buffer.view(DType::bf16).count() == 5);
  CHECK(buffer.view(DType::u8).as<std::uint8_t>().size() == 10);
  CHECK_THROWS_WITH(buffer.view(DType::fp32), Catch::Contains("B1003") && Catch::Contains("multiple of 4"));
}

TEST_CASE("an absurd size is an error, not a crash") {
  for (const std::size_t bytes : {std::size_t{1} << 50, std::size_t{1} << 63, SIZE_MAX}) {
    CHECK(refusal(bytes, "free memory") == 0);
  }
}

TEST_CASE("an allocation that fails leaves nothing booked") {
  MemoryAccounts accounts;
  CHECK_THROWS_AS(allocate(accounts, {.bytes = std::size_t{1} << 50, .owner = "a"}), ResourceError);
  CHECK(accounts.total(MemoryKind::pageable).now == 0);
  CHECK(accounts.total(MemoryKind::pageable).peak == 0);
  CHECK_NOTHROW(allocate(accounts, {.bytes = mebibyte, .owner = "a"}));
}

TEST_CASE("a limit on the address space is named by the error") {
  CHECK(in_child([] {
          const rlimit limit{own_bytes("VmSize:") + 64 * mebibyte, RLIM_INFINITY};
          setrlimit(RLIMIT_AS, &limit);
          return refusal(256 * mebibyte, "RLIMIT_AS");
        }) == 0);
}

TEST_CASE("an allocation above the container's limit is refused") {
  namespace fs = std::filesystem;
  const bool v1 = fs::exists("/sys/fs/cgroup/memory");
  const fs::path group =
      fs::path(v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup") / ("ballast-test-" + std::to_string(getpid()));
  std::error_code error;
  fs::create_directory(group, error);
  std::ofstream(group / (v1 ? "memory.limit_in_bytes" : "memory.max")) << 256 * mebibyte << std::flush;
  const int status = in_child([&] {
    std::ofstream procs(group / "cgroup.procs");
    const bool joined = static_cast<bool>(procs << getpid() << std::flush);
    const std::optional<ResourceLimit> tightest = read_host_limits().cgroup;
    if (!joined || !tightest || tightest->limit != 256 * mebibyte) {
      return 77;
    }
    return refusal(300 * mebibyte, "container's memory limit") + 10 * (1 - refusal(64 * mebibyte, ""));
  });
  fs::remove(group, error);
  if (status == 77) {
    return skip("this process may not make a control group with a memory limit");
  }
  CHECK(status == 0);
}

TEST_CASE("many allocations leak no memory") {
  MemoryAccounts accounts;
  allocate(accounts, {.bytes = 8 * mebibyte, .owner = "warm-up"});
  allocate(accounts,
           {.kind = MemoryKind::pinned, .bytes = mebibyte, .owner = "warm-up"});  // starts CUDA, which maps much
  const std::size_t before = own_bytes("VmRSS:");
  const std::size_t mapped = own_bytes("VmSize:");
  for (int round = 0; round < 500; ++round) {
    const Buffer large = allocate(accounts, {.bytes = 6 * mebibyte + 5, .owner = "a"});
    const Buffer small = allocate(accounts, {.kind = MemoryKind::pinned, .bytes = mebibyte + 5, .owner = "b"});
  }
  CHECK(own_bytes("VmRSS:") < before + 400 * mebibyte);  // 3,500 were used; sanitizers keep freed strings for a while
  CHECK(own_bytes("VmSize:") < mapped + 400 * mebibyte);
}

TEST_CASE("threads may allocate at the same time") {
  MemoryAccounts accounts;
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&accounts] {
        for (int round = 0; round < 50; ++round) {
          const Buffer buffer = allocate(accounts, {.bytes = mebibyte, .owner = "shared"});
          buffer.data()[mebibyte - 1] = std::byte{1};
        }
      });
    }
  }
  CHECK(accounts.total(MemoryKind::pageable).now == 0);
  CHECK(accounts.total(MemoryKind::pageable).peak <= 4 * mebibyte);
}

TEST_CASE("without a GPU, pinned memory is pageable memory that states the reason") {
  if (!device::list().empty()) {
    return skip("this machine has a GPU");
  }
  MemoryAccounts accounts;
  const Buffer buffer = allocate(accounts, {.kind = MemoryKind::pinned, .bytes = 5000, .owner = "staging"});
  CHECK_FALSE(buffer.pinned());
  CHECK_THAT(buffer.unpinned_because(), Catch::StartsWith("no GPU"));
  CHECK(buffer.kind() == MemoryKind::pinned);
  buffer.data()[4999] = std::byte{1};
}

TEST_CASE("without a GPU, allocating device memory fails with the reason") {
  if (!device::list().empty()) {
    return skip("this machine has a GPU");
  }
  MemoryAccounts accounts;
  CHECK_THROWS_WITH(allocate(accounts, {.kind = MemoryKind::device, .bytes = 16, .owner = "slots"}),
                    Catch::Contains("B2101") || Catch::Contains("B2102"));
  CHECK(accounts.total(MemoryKind::device).now == 0);
}
