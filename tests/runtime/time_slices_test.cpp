#include "kernels/runtime/machine.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <catch2/catch.hpp>
#include <cstdint>
#include <thread>

#include "tests/skip.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

// Returns the nanoseconds of this thread's slices, as the kernel says in the fourth word of its sched_attr.
std::uint64_t nanoseconds_of_slice() {
  std::array<std::uint64_t, 6> words{};
  ::syscall(SYS_sched_getattr, 0, words.data(), sizeof words, 0);
  return words[3];
}

}  // namespace

TEST_CASE("time slices are short while the object lives, and in threads that begin meanwhile") {
  const std::uint64_t before = nanoseconds_of_slice();
  std::uint64_t meanwhile = 0, of_thread = 0;
  std::thread thread;
  {
    const ShortTimeSlices short_slices;
    meanwhile = nanoseconds_of_slice();
    thread = std::thread([&] { of_thread = nanoseconds_of_slice(); });
  }
  thread.join();
  CHECK(nanoseconds_of_slice() == before);
  if (meanwhile == before) return skip("this kernel has no slices of a thread's own");
  CHECK(meanwhile == 100'000);
  CHECK(of_thread == 100'000);
}

TEST_CASE("a thread with short time slices passes them on to no thread that it starts") {
  std::uint64_t meanwhile = 0, of_child = 0;
  std::thread([&] {
    use_short_time_slices();
    meanwhile = nanoseconds_of_slice();
    std::thread([&] { of_child = nanoseconds_of_slice(); }).join();
  }).join();
  CHECK(of_child == nanoseconds_of_slice());
  if (meanwhile == of_child) return skip("this kernel has no slices of a thread's own");
  CHECK(meanwhile == 100'000);
}
