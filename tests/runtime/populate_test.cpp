#include "kernels/runtime/host_pages.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cerrno>
#include <cstring>
#include <span>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/device.h"
#include "tests/limited_child.h"
#include "tests/runtime/process.h"
#include "tests/skip.h"

using namespace ballast;

namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t slice = std::size_t{32} << 20;  // the work that a thread takes at once

HostPages unwritten(std::size_t bytes) { return map_host_pages(bytes, "test", Resident::when_written); }

std::size_t missing_pages(const std::byte* pages, std::size_t bytes) {
  std::vector<unsigned char> is_there(bytes / page);
  mincore(const_cast<std::byte*>(pages), bytes, is_there.data());
  return static_cast<std::size_t>(std::ranges::count_if(is_there, [](unsigned char one) { return (one & 1) == 0; }));
}

// Does what std::all_of() would, and is fast under sanitizers too.
bool all_zero(std::span<const std::byte> bytes) {
  return bytes[0] == std::byte{0} && std::memcmp(&bytes[0], &bytes[1], bytes.size() - 1) == 0;
}

}  // namespace

TEST_CASE("any number of threads makes all pages resident, and leaves them zero") {
  for (const int threads : {0, 1, 3, 100}) {
    for (const std::size_t bytes : {page, slice, 3 * slice + page}) {
      CAPTURE(threads, bytes);
      const HostPages pages = unwritten(bytes);
      REQUIRE(missing_pages(pages.get(), bytes) == bytes / page);
      CHECK(populate({pages.get(), bytes}, threads) == 0);
      CHECK(missing_pages(pages.get(), bytes) == 0);
      CHECK(all_zero({pages.get(), bytes}));
    }
  }
}

namespace {

// Maps a page of a file that has none, so that the page cannot become resident. A hole could be mapped by other threads.
void make_unreachable(std::byte* at) {
  const int file = memfd_create("no pages", MFD_CLOEXEC);
  REQUIRE(mmap(at, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == at);
  close(file);
}

}  // namespace

TEST_CASE("an error of any thread is returned") {
  constexpr std::size_t bytes = 4 * slice;
  for (const std::size_t hole : {0 * slice, 2 * slice - page, 4 * slice - page}) {
    for (const int threads : {1, 4}) {
      const HostPages pages = unwritten(bytes);
      make_unreachable(pages.get() + hole);
      CHECK(populate({pages.get(), bytes}, threads) == EFAULT);
    }
  }
  const HostPages pages = unwritten(bytes);
  for (std::size_t begin = 0; begin < bytes; begin += slice) {
    make_unreachable(pages.get() + begin);
  }
  CHECK(populate({pages.get(), bytes}, 4) == EFAULT);
}

TEST_CASE("pages become resident where the system refuses threads") {
  CHECK(in_child([] {
          constexpr std::size_t bytes = 3 * slice;
          const HostPages pages = unwritten(bytes);
          const rlimit limit{own_bytes("VmSize:") + 256 * page, RLIM_INFINITY};  // the stack of a thread needs more
          setrlimit(RLIMIT_AS, &limit);
          return populate({pages.get(), bytes}, 4) == 0 && missing_pages(pages.get(), bytes) == 0 ? 0 : 1;
        }) == 0);
}

TEST_CASE("memory that cannot be pinned becomes resident when it is written, if that was requested") {
  if (!device::list().empty()) return skip("this machine has a GPU");
  MemoryAccounts accounts;
  for (const Resident resident : {Resident::at_once, Resident::when_written}) {
    const Buffer buffer =
        allocate(accounts, {.kind = MemoryKind::pinned, .bytes = 2 * slice, .owner = "moments", .resident = resident});
    const std::size_t expected = resident == Resident::when_written ? buffer.bytes() / page : 0;
    CHECK(missing_pages(buffer.data(), buffer.bytes()) == expected);
  }
}

TEST_CASE("writes to pages after their release to the kernel are kept") {
  const HostPages pages = map_host_pages(2 * slice, "test");
  std::memset(pages.get(), 7, 2 * slice);
  release_when_short(pages);
  std::memset(pages.get() + slice, 9, page);
  const std::span<const std::byte> written(pages.get() + slice, page);
  REQUIRE(std::ranges::all_of(written, [](std::byte each) { return each == std::byte{9}; }));
  REQUIRE((pages[0] == std::byte{7} || pages[0] == std::byte{0}));
}

TEST_CASE("pages become resident where a filter of system calls refuses madvise()") {
  CHECK(testing::in_a_child([]() -> std::string {
          testing::forbid(SYS_madvise, EPERM);
          const HostPages pages = map_host_pages(3 * page, "test");
          return missing_pages(pages.get(), 3 * page) == 0 ? "works" : "pages are missing";
        }) == "works");
}

TEST_CASE("the error for a refused call names the call, and no memory that is available") {
  const std::string error = testing::in_a_child([]() -> std::string {
    testing::forbid(SYS_madvise, ENOMEM);
    map_host_pages(3 * page, "test");
    return "works";
  });
  CHECK_THAT(error,
             Catch::Contains("B2001") && Catch::Contains("refuses madvise(MADV_POPULATE_WRITE): Cannot allocate"));
  CHECK_THAT(error, !Catch::Contains("available:"));
}
