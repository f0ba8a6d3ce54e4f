// Compares each kernel on several threads with the same kernel on one. This test is short because it runs under
// ThreadSanitizer; the other tests of this folder check arithmetic, and would take hours there.
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "kernels/backend.h"
#include "kernels/state_math.h"

namespace ballast::kernels {
namespace {

constexpr std::size_t count = 300'000;  // some tasks for each thread, and an incomplete group at the end

std::vector<float> waves() {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = std::sin(static_cast<float>(i));
  }
  return values;
}

struct Results {
  std::vector<std::uint16_t> halves = std::vector<std::uint16_t>(count);
  std::vector<float> numbers = std::vector<float>(count);
  std::vector<float> momentum = std::vector<float>(count);
  std::vector<float> variance = std::vector<float>(count);
  ExactSum sum;
  std::uint64_t first_bad = no_index;

  bool operator==(const Results&) const = default;
};

Results compute_all(int threads) {
  const auto backend = cpu_backend({.threads = threads});
  std::vector<float> values = waves();
  const View source{std::span(values)};
  Results results;
  const View numbers{std::span(results.numbers)};
  const View halves{reinterpret_cast<std::byte*>(results.halves.data()), count, DType::bf16};
  backend->clear(numbers);
  backend->accumulate(source, numbers);
  backend->cast(source, halves);
  backend->sum_of_squares(source, &results.sum);
  for (const std::size_t bad : {299'999u, 123'456u, 200'000u}) {
    values[bad] = std::numeric_limits<float>::infinity();
  }
  backend->first_non_finite(source, 7, &results.first_bad);
  TileMemory tile{.parameter_dtype = DType::fp32, .count = count};
  tile.parameter = numbers.data();
  tile.gradient = halves.data();
  tile.momentum = reinterpret_cast<std::byte*>(results.momentum.data());
  tile.variance = reinterpret_cast<std::byte*>(results.variance.data());
  const std::vector<GroupStep> groups{{AdamW{0.99f, RunningMean::of(0.9), 0.999f, 0.001f, 30.0f, 1e-8f, 1e-3f}, 1.0f}};
  const std::vector<Run> runs{{0, 100'000, 0}, {100'100, count - 100'100, 0}};
  backend->update(tile, runs, groups);
  return results;
}

}  // namespace

TEST_CASE("kernels on several threads give the bits of one thread") {
  const Results expected = compute_all(1);
  CHECK(expected.first_bad == 7 + 123'456);
  for (const int threads : {2, 3}) {
    CHECK(compute_all(threads) == expected);
  }
}

}  // namespace ballast::kernels
