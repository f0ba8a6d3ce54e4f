// The layout of one tile's optimizer state: contiguous, so that a drive reads and writes a tile with one request each. A pure
// value; the caller owns the memory.
#pragma once

#include <ballast/optim.h>
#include <ballast/state_format.h>

#include <span>
#include <string_view>
#include <vector>

namespace ballast::optim {

struct StateField {
  std::string_view name;  // "master", "momentum", "variance", "momentum scales", "variance scales", "own 0" to "own 7"
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

// The state of one element, and its format.
struct StateKind {
  StateFormat format = StateFormat::fp32;
  DType parameter = DType::bf16;
  StateNames names;
};

class StateLayout {
 public:
  StateLayout(const StateKind& kind, std::size_t elements);

  StateFormat format() const { return kind_.format; }
  std::span<const StateField> fields() const { return fields_; }
  std::size_t bytes() const { return bytes_; }

  // A tile whose state begins at `state`. A tile may hold fewer elements than the layout was made for.
  TileMemory tile(std::byte* state) const;

  // A stretch of the tile, which begins with a group: its bytes in each field of this layout, and its own layout, which
  // has the same fields.
  std::vector<StateField> fields_of(std::size_t first, std::size_t count) const;
  StateLayout layout_of(std::size_t count) const { return {kind_, count}; }

 private:
  void add(std::string_view name, std::size_t bytes);
  std::byte* at(std::byte* state, std::string_view name) const;
  OwnValues own_values(std::byte* state) const;

  StateKind kind_;
  std::size_t elements_;
  std::vector<StateField> fields_;
  std::size_t bytes_ = 0;
};

}  // namespace ballast::optim
