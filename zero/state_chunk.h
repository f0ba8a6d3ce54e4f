// A part of a tensor as a checkpoint holds it: its parameter, then its state, laid out as in a tile's block. Pure.
#pragma once

#include <optional>

#include "optim/state_layout.h"

namespace ballast {

struct ChunkKind {
  DType parameter = DType::fp32;
  std::optional<kernels::StateFormat> format{};  // none: the parameter alone
  bool momentum = false;
  bool variance = false;

  std::size_t bytes(std::size_t elements) const;
  kernels::UpdateTile tile(std::byte* chunk, std::size_t elements) const;
};

ChunkKind kind_of(const kernels::UpdateTile& tile, bool frozen);

}  // namespace ballast
