#include "optim/state_layout.h"

#include <catch2/catch.hpp>

#include "kernels/state_math.h"

using namespace ballast;
using optim::StateLayout;

namespace {

// Returns the bytes without padding and without the scales of groups.
double bytes_per_element(StateFormat format, const optim::Rule& rule, DType parameter = DType::bf16) {
  constexpr std::size_t elements = 1024;
  const StateLayout layout({format, parameter, optim::state_names(rule)}, elements);
  std::size_t bytes = 0;
  for (const optim::StateField& field : layout.fields())
    bytes += field.name.ends_with("scales") ? 0 : field.bytes;
  return static_cast<double>(bytes) / elements;
}

}  // namespace

TEST_CASE("AdamW stores 12, 10, 6, 3 and 2 bytes per element") {
  CHECK(bytes_per_element(StateFormat::fp32, optim::AdamW{}) == 12);
  CHECK(bytes_per_element(StateFormat::split, optim::AdamW{}) == 10);
  CHECK(bytes_per_element(StateFormat::bf16, optim::AdamW{}) == 6);
  CHECK(bytes_per_element(StateFormat::compact, optim::AdamW{}) == 3);
  CHECK(bytes_per_element(StateFormat::four_bit, optim::AdamW{}) == 2);
}

TEST_CASE("rules store only the state that they need, and an fp32 parameter is its own master") {
  CHECK(bytes_per_element(StateFormat::fp32, optim::Sgd{}) == 4);
  CHECK(bytes_per_element(StateFormat::fp32, optim::Lion{}) == 8);
  CHECK(bytes_per_element(StateFormat::fp32, optim::AdamW{}, DType::fp32) == 8);
  CHECK(bytes_per_element(StateFormat::fp32, optim::Sgd{}, DType::fp32) == 0);
}

TEST_CASE("the fields of a tile's state do not overlap, are aligned, and end at its size") {
  for (const StateFormat format : all_state_formats) {
    for (const std::size_t elements : {0u, 1u, 127u, 128u, 129u, 100'000u}) {
      const StateLayout layout({format, DType::bf16, optim::AdamW::state}, elements);
      std::size_t end = 0;
      for (const optim::StateField& field : layout.fields()) {
        CHECK(field.offset % 64 == 0);
        CHECK(field.offset >= end);
        end = field.offset + field.bytes;
      }
      CHECK(end <= layout.bytes());
      CHECK(layout.bytes() < end + 64);
    }
  }
}

TEST_CASE("a tile points to its parts, with null for absent ones") {
  alignas(64) std::byte state[64 * 1024];
  const StateLayout layout({StateFormat::compact, DType::bf16, optim::Lion::state}, 1000);
  const TileMemory tile = layout.tile(state);
  CHECK(tile.master == state);
  CHECK(tile.momentum == state + layout.fields()[1].offset);
  CHECK(tile.variance == nullptr);
  CHECK(tile.variance_scales == nullptr);
  CHECK(reinterpret_cast<std::byte*>(tile.momentum_scales) == state + layout.fields()[2].offset);
  CHECK(layout.fields()[2].bytes == 8 * sizeof(float));
}
