// Tests of counts and indices above 2^31, in sparse memory: only the pages at the ends take memory.
#include <catch2/catch.hpp>

#include "kernels/backend.h"
#include "tests/kernels/sparse_memory.h"
#include "tests/kernels/update_memory.h"
#include "tests/skip.h"

using namespace ballast;
using namespace ballast::kernels;

namespace {

struct Array {
  std::byte* from;
  std::byte* to;
  std::size_t bytes;
};

// Returns the arrays of a small tile, and their places from element `first` of a huge tile.
std::vector<Array> arrays_of(const TileMemory& small, const TileMemory& huge, std::size_t first) {
  const TileMemory at = part(huge, first, small.count);
  const std::size_t moment = moment_bytes(small.format, small.count);
  return {{small.parameter, at.parameter, 2 * small.count},
          {const_cast<std::byte*>(small.gradient), const_cast<std::byte*>(at.gradient), 2 * small.count},
          {small.master, at.master, master_bytes(small.format) * small.count},
          {small.momentum, at.momentum, moment},
          {small.variance, at.variance, moment}};
}

void copy_scales(float* to, const float* from, std::size_t elements) {
  if (from != nullptr) std::memcpy(to, from, (elements + group_size - 1) / group_size * sizeof(float));
}

}  // namespace

TEST_CASE("the first and last of more than 2^32 elements are updated as those of a small tile") {
  constexpr std::size_t count = (std::size_t{1} << 32) + 3 * group_size;
  constexpr std::size_t end = 1000;
  constexpr std::size_t last = (count - end) / group_size * group_size;
  const std::vector<GroupStep> groups{{.rule = sample_rules().front()}, {.rule = sample_rules()[3]}};
  for (const StateFormat format : all_state_formats) {
    SparseMemory parameter(2 * count), gradient(2 * count), master(4 * count), momentum(4 * count), variance(4 * count);
    SparseMemory momentum_scales(count / 16), variance_scales(count / 16);
    if (!variance.exists() || !master.exists() || !momentum.exists()) {
      ballast::skip("no address space for 70 GB of sparse memory");
      return;
    }
    const TileMemory huge{.format = format,
                          .parameter = parameter.data(),
                          .gradient = gradient.data(),
                          .master = master.data(),
                          .momentum = momentum.data(),
                          .variance = variance.data(),
                          .momentum_scales = reinterpret_cast<float*>(momentum_scales.data()),
                          .variance_scales = reinterpret_cast<float*>(variance_scales.data()),
                          .count = count,
                          .first_index = (std::uint64_t{1} << 40) - group_size};
    UpdateMemory low({.format = format, .count = end, .first_index = huge.first_index}, 1);
    UpdateMemory high({.format = format, .count = count - last, .first_index = huge.first_index + last}, 2);
    for (auto [small, first] : {std::pair{&low, std::size_t{0}}, std::pair{&high, last}}) {
      const TileMemory tile = small->tile();
      for (const Array& array : arrays_of(tile, huge, first)) {
        std::memcpy(array.to, array.from, array.bytes);
      }
      copy_scales(huge.momentum_scales + first / group_size, tile.momentum_scales, tile.count);
      copy_scales(huge.variance_scales + first / group_size, tile.variance_scales, tile.count);
    }
    const auto step = [](const TileMemory& tile, const std::vector<Run>& runs, const std::vector<GroupStep>& steps) {
      TileMemory of_one_stream = tile;
      of_one_stream.rounding_stream = 99;
      cpu_backend({.threads = 2})->update(of_one_stream, runs, steps);
    };
    step(huge, {{0, end, 0}, {last, count - last, 1}}, groups);
    step(low.tile(), {{0, end, 0}}, groups);
    step(high.tile(), {{0, count - last, 1}}, groups);
    INFO(name(format));
    for (auto [small, first] : {std::pair{&low, std::size_t{0}}, std::pair{&high, last}}) {
      const TileMemory tile = small->tile();
      for (const Array& array : arrays_of(tile, huge, first)) {
        CHECK(std::memcmp(array.to, array.from, array.bytes) == 0);
      }
    }
  }
}
