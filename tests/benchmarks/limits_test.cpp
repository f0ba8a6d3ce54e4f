#include <ballast/error.h>

#include "benchmarks/harness/limits.h"

#include <catch2/catch.hpp>
#include <mutex>
#include <numeric>

using namespace ballast::benchmarks;

TEST_CASE("slices cover each element once and begin at multiples of the grain") {
  for (const std::size_t count : {0u, 1u, 15u, 16u, 17u, 1000u, 4096u}) {
    Threads threads(2);
    std::mutex mutex;
    std::vector<int> visits(count);
    for_slices(threads, count, 16, [&](std::size_t first, std::size_t last) {
      const std::lock_guard lock(mutex);
      CHECK(first % 16 == 0);
      for (std::size_t i = first; i < last; ++i) {
        ++visits[i];
      }
    });
    CHECK(std::count(visits.begin(), visits.end(), 1) == static_cast<std::ptrdiff_t>(count));
  }
}

TEST_CASE("a streaming copy copies every element") {
  for (const std::size_t count : {0u, 1u, 15u, 16u, 17u, 1000u}) {
    alignas(16) std::array<float, 1001> from{};
    alignas(16) std::array<float, 1001> to{};
    std::iota(from.begin(), from.end(), 1.0f);
    stream_copy(to.data(), from.data(), count);
    CHECK(std::equal(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(count), to.begin()));
    CHECK(to[count] == 0.0f);
  }
}

TEST_CASE("the work of a limit is the bytes that it reads and writes") {
  Threads threads(2);
  constexpr std::size_t bytes = 24 << 10;
  Limits limits(bytes, threads);
  for (const Copy& kind : all_copies) {
    CHECK(limits.copy(kind, bytes).work == Approx(bytes / 1e9));
    limits.copy(kind, bytes).run();
  }
  CHECK(limits.read(bytes / 2).work == Approx(bytes / 2e9));
  CHECK(limits.scale(bytes / 2).work == Approx(bytes / 2e9));
  limits.read(bytes / 2).run();
  limits.scale(bytes).run();
}

TEST_CASE("a limit does not reach past its buffers") {
  Threads threads(1);
  Limits limits(8192, threads);
  CHECK_THROWS_AS(limits.copy(all_copies[0], 8200), ballast::UsageError);
  CHECK_THROWS_AS(limits.read(4100), ballast::UsageError);
  CHECK_THROWS_AS(limits.scale(8200), ballast::UsageError);
}
